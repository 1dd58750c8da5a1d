"""Weights go to Megatron-LM's checkpoint format and back, bit for bit; a file from a stranger runs no code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from quantexp.cli.export import export
from quantexp.errors import ConfigError, DataError
from quantexp.extras.megatron_lm.checkpoint_reader import (
    folder_of_iteration,
    is_checkpoint,
    no_word_of_one_process,
    place_of,
    read_weights,
)
from quantexp.extras.megatron_lm.checkpoint_writer import _content, arguments_of, write_checkpoint
from quantexp.extras.megatron_lm.described import model_of
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.sizes import padded_vocab_size
from tests.model.huggingface.published import FAMILIES, of_folder, published_model, write

#: Numbers that Megatron-LM has no argument for: they change no weight.
_NOT_THEIRS: dict[str, Any] = {"name": "", "init_from": None, "sliding_window": None}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint("llama31", tmp_path_factory.mktemp("llama"))


def _checkpoint(family: str, folder: Path) -> Path:
    config = FAMILIES[family]
    published = write(published_model(config), config, folder / "published")
    weights = open_weights(published)
    write_checkpoint(of_folder(published), weights, None, folder / "checkpoint", 7)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_returns_bit_for_bit(family: str, tmp_path: Path) -> None:
    """The vocabulary comes back with Megatron's padding, which is zero."""
    folder = _checkpoint(family, tmp_path)
    out = export([str(folder / "checkpoint"), "format=hf", f"out={tmp_path / 'back'}"], tmp_path)
    before = load_file(folder / "published" / "model.safetensors")
    after = load_file(out / "model.safetensors")
    rows = before["model.embed_tokens.weight"].shape[0]
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    for name in vocabulary:
        if name in after:
            assert not after[name][rows:].any()
            after[name] = after[name][:rows]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert of_folder(out).vocab_size == padded_vocab_size(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_returns_from_its_arguments(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    model = of_folder(tmp_path)
    again = model_of(arguments_of(model))
    expected = dataclasses.replace(
        model, **_NOT_THEIRS, vocab_size=padded_vocab_size(model.vocab_size)
    )
    if expected.moe is not None:  # the balancing loss is the optimizer's, not the model's
        expected.moe.aux_loss, expected.moe.aux_loss_coefficient = (
            again.moe.aux_loss,
            again.moe.aux_loss_coefficient,
        )
    assert dataclasses.replace(again, **_NOT_THEIRS) == expected


def test_the_last_iteration_is_read_unless_one_is_named(llama: Path) -> None:
    folder = llama / "checkpoint"
    assert is_checkpoint(folder)
    assert is_checkpoint(folder / "iter_0000007")
    assert not is_checkpoint(llama)
    assert folder_of_iteration(folder).name == "iter_0000007"
    assert folder_of_iteration(folder / "iter_0000007") == folder / "iter_0000007"
    with pytest.raises(DataError, match=r"checkpoint has no iter_0000003"):
        folder_of_iteration(folder, "3")


def test_names_of_layers_that_differ_are_found() -> None:
    """As Megatron-LM 0.16.1 writes them, for layers that are alike and for others."""
    stored = dict.fromkeys(
        [
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
            "decoder.final_layernorm.weight",
        ]
    )
    norm = place_of("decoder.layers.1.input_layernorm.weight", stored)
    assert norm == ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (1,))
    expert = place_of("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", stored)
    assert expert == ("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (3,))
    assert place_of("decoder.layers.0.mlp.linear_fc1.weight", stored) is None
    assert place_of("output_layer.weight", stored) is None


class _Runs:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_a_pickle_runs_no_code(llama: Path, tmp_path: Path) -> None:
    folder, trace = tmp_path / "stranger", tmp_path / "trace"
    args = arguments_of(of_folder(llama / "published"))
    state = {"args": args, "model": {}, "evil": _Runs(f"touch {trace}")}
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save(state, folder / "mp_rank_00" / "model_optim_rng.pt")
    torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert trace.exists()  # it would
    trace.unlink()
    with pytest.raises(DataError, match=r"word_embeddings.weight of shape .* is missing"):
        read_weights(folder)
    assert not trace.exists()


def test_arguments_may_lie_among_the_tensors(llama: Path, tmp_path: Path) -> None:
    """As Megatron-LM 0.19 writes them; there, too, a pickle runs no code."""
    before, trace = read_weights(llama / "checkpoint" / "iter_0000007"), tmp_path / "trace"
    model = of_folder(llama / "published")
    common = {"args": arguments_of(model), "evil": _Runs(f"touch {trace}")}
    content = _content(model, open_weights(llama / "published"), None)
    for name, parts in (("with", {"common_state/shard_0_1": [common]}), ("without", {})):
        with no_word_of_one_process():
            writer = FileSystemWriter(tmp_path / name)
            planner = DefaultSavePlanner(flatten_state_dict=False)
            save({**content, **parts}, storage_writer=writer, planner=planner, no_dist=True)
    again = read_weights(tmp_path / "with")
    assert again.model == before.model
    assert all(torch.equal(again.tensor(name), before.tensor(name)) for name in before.sources)
    assert not trace.exists()
    with pytest.raises(DataError, match=r"without has no common.pt, and no common state in .meta"):
        read_weights(tmp_path / "without")


def test_what_is_wrong_with_a_checkpoint_is_said(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    for rank in ("00", "01"):
        (folder / f"mp_rank_{rank}").mkdir(parents=True)
    file = folder / "mp_rank_00" / "model_optim_rng.pt"
    args = arguments_of(of_folder(llama / "published"))

    def refused(content: object, kind: type[Exception], words: str) -> None:
        torch.save(content, file)
        with pytest.raises(kind, match=words):
            read_weights(folder)

    args.tensor_model_parallel_size = args.world_size = 2
    refused({"args": args, "model": {}}, DataError, r"mp_rank_01.model_optim_rng.pt cannot be read")
    refused({"model": {}}, DataError, r"model_optim_rng.pt has no arguments of Megatron-LM")
    refused([1], DataError, r"model_optim_rng.pt is no checkpoint of Megatron-LM")
    other = argparse.Namespace(**{**vars(args), "swiglu": False})
    refused({"args": other}, ConfigError, r"model_optim_rng.pt: --swiglu is missing")
    file.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"model_optim_rng.pt cannot be read: "):
        read_weights(folder)
    inner = tmp_path / "iter_0000007"
    inner.mkdir()
    (inner / "common.pt").write_bytes((llama / "checkpoint/iter_0000007/common.pt").read_bytes())
    (inner / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(DataError, match=r"\.metadata cannot be read: "):
        read_weights(inner)


def test_export_of_a_checkpoint_needs_its_words(llama: Path, tmp_path: Path) -> None:
    folder = str(llama / "checkpoint")
    with pytest.raises(ConfigError, match=r"is no run folder.*; give out=FOLDER"):
        export([folder, "format=hf"], tmp_path)
    with pytest.raises(ConfigError, match=r"is a checkpoint of Megatron-LM already; export it"):
        export([folder, "format=megatron_lm", f"out={tmp_path / 'x'}"], tmp_path)

"""Weights survive the round trip through a model bit for bit and are never in memory twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.safetensors import write_safetensors
from quantexp.schema import ModelConfig, Precision
from quantexp.training.megatron.model import build_model
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import stock_spec
from quantexp.training.megatron.transformer_config import DTYPES
from tests.model.huggingface.memory import bytes_of_loading
from tests.model.huggingface.published import (
    FAMILIES,
    LLAMA31,
    as_model,
    of_folder,
    published_model,
    training,
    write,
)
from tests.training.megatron.whole_models import load as load_whole
from tests.training.megatron.whole_models import saved_tensors


def load(model: ModelConfig, precision: Precision, use: Callable[[Any], None]) -> None:
    with session(training(precision)):
        gpt, _ = build_model(model, training(precision), stock_spec(model))
        load_whole(gpt, model)
        use(gpt)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp32])
def test_round_trip_keeps_every_bit(family: str, precision: Precision, tmp_path: Path) -> None:
    dtype = DTYPES[precision]
    config = FAMILIES[family]
    write(published_model(config).to(dtype), config, tmp_path, max_shard_size="50KB")
    weights = open_weights(tmp_path)
    expected: dict[str, torch.Tensor] = {}
    for file in weights.files:
        expected |= load_file(file)

    def use(gpt: Any) -> None:
        model = of_folder(tmp_path)
        saved = saved_tensors(gpt, model, precision, tmp_path / "saved")
        tensors = {name: saved.tensor(name) for name in published(mapping(model))}
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensors[name], tensor), name

    load(of_folder(tmp_path), precision, use)


def test_other_dtypes_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    write(published_model(LLAMA31), LLAMA31, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]

    def use(gpt: Any) -> None:
        assert torch.equal(gpt.embedding.word_embeddings.weight[:201], expected.bfloat16())

    load(of_folder(tmp_path), Precision.bf16, use)


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    write(published_model(LLAMA31), LLAMA31, tmp_path)

    def use(gpt: Any) -> None:
        for layer in (gpt.embedding.word_embeddings, gpt.output_layer):
            assert layer.weight.shape[0] == 256
            assert layer.weight[:201].count_nonzero() > 0
            assert layer.weight[201:].count_nonzero() == 0

    load(of_folder(tmp_path), Precision.fp32, use)


@pytest.mark.slow
def test_weights_are_never_in_memory_twice(tmp_path: Path) -> None:
    """Measures the peak resident set, which includes the files' mapped pages.

    The pages of the largest parameter, 6% of the model, are in memory besides it; the limit is 20%. Loading runs in its
    own process, since this one may reuse memory that earlier tests freed.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not reset the peak resident set")
    config = {
        **LLAMA31,
        "vocab_size": 128,
        "hidden_size": 576,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
    }
    index: dict[str, dict[str, torch.Tensor]] = {}
    shapes, size = published(mapping(as_model(config))), 0
    for number, (name, shape) in enumerate(shapes.items()):
        file = f"model-{2 * number // len(shapes)}.safetensors"
        index.setdefault(file, {})[name] = torch.ones(shape, dtype=torch.bfloat16)
        size += index[file][name].nbytes
    for file, tensors in index.items():
        write_safetensors(tmp_path / file, tensors, {})
    names = {name: file for file, tensors in index.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        grown = pool.submit(bytes_of_loading, tmp_path, config).result()
    assert size > 110e6
    assert 0.5 * size < grown < 1.2 * size

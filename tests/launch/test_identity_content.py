"""A run's hash covers the content of data and weights, not their paths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantexp.data.binary import fingerprint
from quantexp.data.sources import Document
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import DataError
from quantexp.launch.identity import identity
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.safetensors import write_safetensors
from quantexp.schema import (
    Experiment,
    TokenizerKind,
)
from tests.data.pairs import write_binary

from .identities import digest


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a byte-tokenised .bin/.idx pair with this text and returns its prefix."""

    def write(name: str, text: str) -> Path:
        prefix = tmp_path / name / "data"
        prefix.parent.mkdir()
        write_binary([Document("1", text, "test")], prefix, ByteTokenizer())
        return prefix

    return write


def with_data(base: Experiment, prefix: Path) -> Experiment:
    experiment = copy.deepcopy(base)
    dataset = experiment.dataset
    dataset.sample, dataset.path = False, str(prefix)
    dataset.tokenizer = TokenizerKind.byte
    return experiment


def test_datas_content_counts_and_its_path_does_not(
    base: Experiment, prepared: Callable[[str, str], Path]
) -> None:
    here, there = prepared("here", "one text"), prepared("there", "one text")
    other = prepared("other", "two text")
    assert digest(with_data(base, here)) == digest(with_data(base, there))
    assert digest(with_data(base, here)) != digest(with_data(base, other))
    assert digest(with_data(base, here)) != digest(base)


@pytest.fixture
def weights(base: Experiment, tmp_path: Path) -> Callable[[str, float], Path]:
    """Writes weights of this value that fit a small model of the base's kind and returns their folder."""

    def write(name: str, value: float) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        shapes = published(mapping(small(base).model))
        tensors = {name: torch.full(shape, value) for name, shape in shapes.items()}
        write_safetensors(folder / "model.safetensors", tensors, {})
        return folder

    return write


def small(base: Experiment, init_from: Path | None = None) -> Experiment:
    experiment = copy.deepcopy(base)
    model = experiment.model
    model.hidden_size, model.ffn_hidden_size, model.head_dim = 32, 32, 8
    model.init_from = None if init_from is None else str(init_from)
    return experiment


def test_initial_weights_count_by_their_content(
    base: Experiment, weights: Callable[[str, float], Path]
) -> None:
    here, there, other = weights("here", 1.0), weights("there", 1.0), weights("other", 2.0)
    assert digest(small(base, here)) == digest(small(base, there))
    assert len({digest(small(base, w)) for w in (here, other, None)}) == 3
    assert "initial_weights" in identity(small(base, here), "cpu")["model"]
    assert str(here) not in str(identity(small(base, here), "cpu"))


def test_weights_of_another_model_have_no_identity(
    base: Experiment, weights: Callable[[str, float], Path]
) -> None:
    experiment = small(base, weights("here", 1.0))
    experiment.model.num_layers = 3
    with pytest.raises(
        DataError, match=r"9 tensors missing: model\.layers\.2\.input_layernorm\.weight, "
    ):
        identity(experiment, "cpu")


def test_no_data_at_all_says_what_to_give(base: Experiment) -> None:
    experiment = copy.deepcopy(base)
    experiment.dataset.sample = False
    with pytest.raises(
        DataError,
        match=r"dataset=wikipedia has no data: give dataset\.path=PREFIX of a Megatron \.bin/\.idx "
        r"pair and its dataset\.tokenizer_path=FOLDER, or raw text \(`quantexp prepare dataset=wikipedia "
        r"dataset\.source=FILES` writes data/wikipedia, which runs find\), or training=fast for the built-in sample",
    ):
        identity(experiment, "cpu")


def test_missing_pair_is_named(base: Experiment, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere"):
        identity(with_data(base, tmp_path / "nowhere"), "cpu")


def test_missing_tokenizer_path_says_what_to_give(
    base: Experiment, prepared: Callable[[str, str], Path]
) -> None:
    experiment = with_data(base, prepared("here", "one text"))
    experiment.dataset.tokenizer = TokenizerKind.huggingface
    words = r"dataset\.tokenizer=huggingface needs a path: give a fol.*or dataset\.tokenizer=byte, which needs nothing"
    with pytest.raises(DataError, match=words):
        identity(experiment, "cpu")


def test_an_unfinished_preparation_is_named(
    base: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "wikipedia.partial").mkdir(parents=True)
    experiment = copy.deepcopy(base)
    experiment.dataset.sample = False
    with pytest.raises(DataError, match=r"has no data: .*data/wikipedia\.partial is an unfinished"):
        identity(experiment, "cpu")


def test_content_that_changes_under_the_same_path_changes_the_hash(
    base: Experiment, prepared: Callable[[str, str], Path]
) -> None:
    """Points of a sweep share the digest of their data, as long as the files are the same."""
    prefix = prepared("here", "one text")
    experiment = with_data(base, prefix)
    before = digest(experiment)
    assert digest(experiment) == before
    write_binary([Document("1", "two text", "test")], prefix, ByteTokenizer())
    assert digest(experiment) != before


def test_data_is_read_once_for_all_points(
    base: Experiment, prepared: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(prefix: Path) -> str:
        read.append(prefix)
        return fingerprint(prefix)

    monkeypatch.setattr("quantexp.launch.fingerprints.fingerprint", counted)
    experiment = with_data(base, prepared("shared", "one text"))
    assert len({digest(experiment) for _ in range(3)}) == 1
    assert len(read) == 1

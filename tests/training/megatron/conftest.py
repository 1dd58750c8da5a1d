"""Datasets of the built-in sample, with a card and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.data.sample import read_sample, sample_prefix
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.training.megatron import data_loader
from quantexp.training.megatron.data_loader import Datasets, batches, build_datasets
from tests.data.pairs import write_binary

T = 64
N = 48


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_prefix("wikipedia", tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair as Megatron writes it, without a card."""
    prefix = tmp_path_factory.mktemp("plain") / "wikipedia_text_document"
    write_binary(read_sample("wikipedia"), prefix, ByteTokenizer())
    return prefix


@pytest.fixture
def build(prefix: Path, tmp_path: Path) -> Callable[..., Datasets]:
    fixed: dict[str, Any] = {"seq_length": T, "seed": 1, "num_samples_train": N}

    def build(path: Path = prefix, **changes: Any) -> Datasets:
        arguments = fixed | {"cache_dir": tmp_path / "cache"} | changes
        return build_datasets(path, ByteTokenizer(), **arguments)

    return build


def tokens_of(data: data_loader.Samples, **arguments: Any) -> Tensor:
    single = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}
    return torch.cat([batch["tokens"] for batch in batches(data, **single | arguments)])

"""Histograms on a GPU: the kernel in Triton's interpreter, and numbers of several tensors at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.capture.statistics.histogram import (
    MOST,
    NUM_BINS,
    Together,
    of_patterns,
    pattern_counts,
)
from quantexp.capture.statistics.summary import Summary, described, statistics, summarise
from tests.formats.kernels.gpu_cases import DTYPES, Call, needs_triton


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Of one dtype: noise, all values, mostly zeros, one value, nothing finite, one element."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(70001, generator=generator)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0])
    some = [noise, every.float(), noise * (noise > 2), torch.ones(9001), special[:3], special[4:]]
    return [x.to(dtype) for x in some]


def patterns(x: Tensor) -> np.ndarray[Any, Any]:
    """The count of each 16-bit pattern, by NumPy."""
    words = x.view(torch.uint8).numpy().view(np.uint16)
    words = words[1::2] if x.dtype == torch.float32 else words
    return np.bincount(words, minlength=NUM_BINS)


def assert_close(record: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same, but for float64 sums in another order: 2^16 additions err by up to 2^-37 of the largest, 7e-12."""
    assert record.keys() == expected.keys()
    scale = expected["abs_max"] or 0.0
    for key, value in expected.items():
        if value is None or key not in ("mean", "std", "skew", "kurtosis", "quantiles"):
            assert record[key] == value, key
        else:
            unit = 1.0 if key in ("skew", "kurtosis") else scale
            assert record[key] == pytest.approx(value, rel=1e-9, abs=1e-11 * unit), key


@pytest.fixture(scope="module")
def call(
    triton_interpreter: Callable[[str], AbstractContextManager[Call]],
) -> Iterator[Call]:
    with triton_interpreter("quantexp.capture.statistics.histogram") as request:
        yield request


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_counts_every_pattern(call: Call, dtype: torch.dtype) -> None:
    for x in (*tensors(dtype), torch.empty(0).to(dtype)):
        counts = call("counts_on_gpu", x)
        assert counts.dtype == torch.int64
        np.testing.assert_array_equal(counts.numpy(), patterns(x))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_numbers_of_several_tensors_are_those_of_each(dtype: torch.dtype) -> None:
    counts = [pattern_counts(x) for x in tensors(dtype)]
    together = described(torch.empty(0), of_patterns(torch.stack(counts), dtype))
    for x, counts_V, row in zip(tensors(dtype), counts, together, strict=True):
        alone = described(x, of_patterns(counts_V, dtype))
        assert torch.equal(row.nan_to_num(), alone.nan_to_num())
        record, expected = Summary(x.numel(), row).record(), statistics(x)
        assert_close(record, expected)


def test_tensors_wait_for_each_other_until_one_is_asked_for_or_they_are_many() -> None:
    sizes = []

    def describe(counts_KV: Tensor) -> Tensor:
        sizes.append(len(counts_KV))
        return counts_KV.to(torch.float64)

    together = Together(describe)
    first, second = together.add(torch.tensor([1, 2])), together.add(torch.tensor([3, 4]))
    assert not sizes
    assert second.numbers().tolist() == [3, 4]
    assert first.numbers().tolist() == first.on_host().tolist() == [1, 2]
    assert sizes == [2]
    for _ in range(MOST):
        together.add(torch.tensor([0, 1]))
    assert sizes == [2, MOST]


def test_several_threads_get_each_its_own_numbers() -> None:
    together, wrong = Together(lambda counts_KV: counts_KV * 2), []

    def use(start: int) -> None:
        for value in range(start, start + 200):
            if together.add(torch.tensor([value])).numbers().item() != 2 * value:
                wrong.append(value)

    threads = [threading.Thread(target=use, args=(1000 * turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_has_the_statistics_of_a_cpu(dtype: torch.dtype) -> None:
    several = tensors(dtype)
    torch.cuda.synchronize()
    there = [x.cuda() for x in several]
    summarise(there[0])  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        summaries = [summarise(x) for x in there]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, summary in zip(several, summaries, strict=True):
        assert_close(summary.record(), statistics(x))

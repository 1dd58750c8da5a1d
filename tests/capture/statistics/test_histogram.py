"""The counts of a GPU are those of a CPU, chunk by chunk."""

from __future__ import annotations

import pytest
import torch

from quantexp.capture.statistics import histogram
from quantexp.capture.statistics.histogram import NUM_BINS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [0, 1, 100, 257])
def test_counts_of_a_gpu_are_those_of_each_bit_pattern(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histogram, "_DEVICE_CHUNK", 100)
    x = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[::3] = -0.0
    words = x.view(torch.int32) >> 16 if dtype == torch.float32 else x.view(torch.int16).int()
    expected = torch.bincount(words.long() & (NUM_BINS - 1), minlength=NUM_BINS)
    counts = histogram._counts(x)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, expected)

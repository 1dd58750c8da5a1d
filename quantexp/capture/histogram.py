"""Every value of a tensor, counted: the histogram from which its statistics follow.

A 16-bit dtype has 65,536 values, so counting them is one pass over the tensor and exact: moments, extremes and
quantiles of the histogram are those of the tensor. float32 is counted by the upper half of its bits, a bfloat16
truncated towards zero: what follows from it is within one part in 128 of the magnitude, and moments come from the
elements themselves (`quantexp.capture.moments`).

Nothing leaves the device: the counts stay where the tensor is. On a CPU, numpy counts in chunks whose widened
indices stay in the cache, which is several times as fast as `torch.bincount`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quantexp.formats.layout import memory_order

NUM_BINS = 1 << 16
_CHUNK = 1 << 16

# V the 65,536 bit patterns; N the elements of a tensor, in the order in which they lie in memory


@dataclass(frozen=True)
class Histogram:
    """How often each value occurs, NaN and Inf apart; on the tensor's device."""

    #: Values, ascending, float64: all finite ones of the dtype, or (on a CPU) those that occur.
    values: Tensor
    #: Their counts, int64.
    counts: Tensor
    #: 0-dim, int64.
    num_nan: Tensor
    num_inf: Tensor
    #: Whether each element is counted at its own value, not at that of its upper half.
    exact: bool


def histogram(x: Tensor) -> Histogram:
    """The histogram of a bfloat16, float16 or float32 tensor of any shape, in one pass over it.

    In float32's a NaN whose upper half is that of infinity counts as infinite.
    """
    x_N = x.detach().permute(memory_order(x)).reshape(-1)
    counts_V = _counts_on_cpu(x_N) if x.device.type == "cpu" else _counts(x_N)
    kind = _kind(torch.bfloat16 if x.dtype == torch.float32 else x.dtype, x.device)
    num_nan, num_inf = counts_V[kind.nan].sum(), counts_V[kind.inf].sum()
    counts, values = counts_V[kind.order], kind.values
    if x.device.type == "cpu":
        occurring = counts.nonzero().squeeze(1)
        counts, values = counts[occurring], values[occurring]
    return Histogram(values, counts, num_nan, num_inf, x.dtype != torch.float32)


def _counts_on_cpu(x_N: Tensor) -> Tensor:
    bits_N = x_N.view(torch.uint16).numpy()
    if x_N.dtype == torch.float32:
        bits_N = bits_N[1::2]  # the upper halves: every machine torch runs on is little-endian
    counts_V = np.zeros(NUM_BINS, np.int64)
    for start in range(0, bits_N.size, _CHUNK):
        counts_V += np.bincount(bits_N[start : start + _CHUNK], minlength=NUM_BINS)
    return torch.from_numpy(counts_V)


def _counts(x_N: Tensor) -> Tensor:
    """Without a look at the counts from the host, which `bincount` takes on other devices."""
    is_wide = x_N.dtype == torch.float32
    bits_N = x_N.view(torch.int32) >> 16 if is_wide else x_N.view(torch.int16).to(torch.int32)
    counts_V = torch.zeros(NUM_BINS, dtype=torch.int32, device=x_N.device)
    index_N = bits_N.bitwise_and_(NUM_BINS - 1).to(torch.int64)
    ones_N = counts_V.new_ones(1).expand(index_N.shape)
    return counts_V.scatter_add_(0, index_N, ones_N).to(torch.int64)


@dataclass(frozen=True)
class _Kind:
    """The bit patterns of a 16-bit dtype, sorted into finite ones by value, NaN and Inf."""

    order: Tensor
    values: Tensor
    nan: Tensor
    inf: Tensor


@cache
def _kind(dtype: torch.dtype, device: torch.device) -> _Kind:
    bits_V = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values_V = bits_V.view(dtype).to(torch.float64)
    index_V = bits_V.to(torch.int64) & (NUM_BINS - 1)
    finite_V = values_V.isfinite()
    values, by_value = values_V[finite_V].sort(stable=True)
    parts = (
        index_V[finite_V][by_value],
        values,
        index_V[values_V.isnan()],
        index_V[values_V.isinf()],
    )
    return _Kind(*(part.to(device) for part in parts))

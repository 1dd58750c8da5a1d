"""The histogram of a tensor's values, from which its statistics are derived.

A 16-bit dtype has 65,536 values, so one pass over the tensor counts them exactly: moments, extremes and quantiles of
the histogram equal those of the tensor. float32 is counted by the upper half of its bits, a bfloat16 truncated towards
zero: derived values are within one part in 128 of the magnitude, and moments use the elements themselves
(`quantexp.capture.statistics.moments`).

The counts stay on the tensor's device. `Together` derives the numbers of several tensors at once: on a GPU, launches
take longest for one alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from quantexp.formats.kernels import gpu
from quantexp.formats.kernels.gpu_panels import on
from quantexp.formats.layout import in_memory_order, memory_order

NUM_BINS = 1 << 16
#: The quantiles, as fractions of the finite elements.
QUANTILES = (0.0001, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 0.9999)
#: Exponents floor(log2 |x|) of the first and last bin of magnitudes; two more bins count elements outside.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -64, 31
NUM_EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 3
#: The number of elements whose widened indices fit in the cache, and on other devices in little memory: 0.2 GB.
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24
#: Elements of a program of Triton's kernel, and its warps.
_SIZE, _NUM_WARPS = 2048, 4
#: Copies of the counts: one for so many elements, and at most so many.
_ELEMENTS_OF_A_COPY, _MOST_COPIES = 1 << 16, 32
#: So many elements can be counted in int32.
_MOST_ELEMENTS = 1 << 31

# V the 65,536 bit patterns; N the elements of a tensor, in the order in which they lie in memory


@dataclass(frozen=True)
class Histogram:
    """The count of each value, with NaN and Inf separate; on the tensor's device.

    `counts`, `num_nan` and `num_inf` of several tensors have one more axis in front.
    """

    #: Ascending values, float64: all finite values of the dtype, or on a CPU only those that occur.
    values: Tensor
    #: Their counts, int64.
    counts: Tensor
    #: 0-dim, int64.
    num_nan: Tensor
    num_inf: Tensor
    #: Whether each element is counted at its own value rather than at that of its upper half.
    exact: bool


def histogram(x: Tensor) -> Histogram:
    """The histogram of a bfloat16, float16 or float32 tensor of any shape, in one pass over it.

    In float32, a NaN whose upper half equals that of infinity counts as infinite.
    """
    counts_V = pattern_counts(x)
    if x.device.type != "cpu":
        return of_patterns(counts_V, x.dtype)
    kind = _kind(torch.bfloat16 if x.dtype == torch.float32 else x.dtype, x.device)
    exact = x.dtype != torch.float32
    num_nan, num_inf = counts_V[kind.nan].sum(), counts_V[kind.inf].sum()
    counts_V.index_fill_(0, kind.nan, 0).index_fill_(0, kind.inf, 0)
    pattern = counts_V.nonzero().squeeze(1)
    num_positive = int(torch.searchsorted(pattern, NUM_BINS // 2))
    pattern = torch.cat([pattern[num_positive:].flip(0), pattern[:num_positive]])
    return Histogram(kind.table[pattern], counts_V[pattern], num_nan, num_inf, exact)


def pattern_counts(x: Tensor) -> Tensor:
    """The count of each 16-bit pattern, int64; for float32, of the upper halves. On a GPU nothing synchronises."""
    x_N = in_memory_order(x.detach(), memory_order(x)).view(-1)
    if x.device.type == "cpu":
        return _counts_on_cpu(x_N)
    return counts_on_gpu(x_N) if is_counted_by_triton(x_N) else _counts(x_N)


def counts_on_gpu(x_N: Tensor) -> Tensor:
    """The count of each 16-bit pattern, int64; for float32, of the upper halves.

    x is contiguous and `is_counted_by_triton`. Nothing synchronises with the device.
    """
    from quantexp.capture.statistics.triton_counts import count_patterns

    N, is_wide = x_N.numel(), x_N.dtype == torch.float32
    copies = min(_MOST_COPIES, N // _ELEMENTS_OF_A_COPY + 1)
    counts_CV = torch.zeros(copies, NUM_BINS, dtype=torch.int32, device=x_N.device)
    if N:
        words = x_N.view(torch.int32 if is_wide else torch.int16)
        with on(x_N):
            count_patterns[(-(-N // _SIZE),)](
                words,
                counts_CV,
                N,
                copies,
                NUM_BINS=NUM_BINS,
                SIZE=_SIZE,
                SHIFT=16 if is_wide else 0,
                num_warps=_NUM_WARPS,
            )
    return counts_CV.sum(0)


def is_counted_by_triton(x: Tensor) -> bool:
    """Whether `counts_on_gpu` takes such a tensor."""
    return x.is_cuda and x.numel() < _MOST_ELEMENTS and gpu.obstacle(x.device) is None


def of_patterns(counts: Tensor, dtype: torch.dtype) -> Histogram:
    """The histogram of one tensor or several of one dtype from their `pattern_counts`, [V] or [K, V]."""
    kind = _kind(torch.bfloat16 if dtype == torch.float32 else dtype, counts.device)
    num_nan, num_inf = (counts.index_select(-1, which).sum(-1) for which in (kind.nan, kind.inf))
    return Histogram(
        kind.values,
        counts.index_select(-1, kind.order),
        num_nan,
        num_inf,
        exact=dtype != torch.float32,
    )


def _counts_on_cpu(x_N: Tensor) -> Tensor:
    """The count of each 16-bit pattern, int64; for float32, of the upper halves."""
    # Every machine torch runs on is little-endian: the upper half of a float32 is the last.
    bits_N = x_N.unsqueeze(1).view(torch.uint16)[:, -1]
    wide_N = torch.empty(min(_CHUNK, bits_N.numel()), dtype=torch.int32)
    counts_V = torch.bincount(wide_N[:0], minlength=NUM_BINS)
    for start in range(0, bits_N.numel(), _CHUNK):
        chunk_N = bits_N[start : start + _CHUNK]
        index_N = wide_N[: chunk_N.numel()].copy_(chunk_N)
        counts_V += torch.bincount(index_N, minlength=NUM_BINS)
    return counts_V


def _counts(x_N: Tensor) -> Tensor:
    """The counts without a synchronisation with the host, which `bincount` needs on other devices."""
    is_wide = x_N.dtype == torch.float32
    counts_V = torch.zeros(NUM_BINS, dtype=torch.int64, device=x_N.device)
    for part_N in torch.split(x_N, _DEVICE_CHUNK):
        bits_N = (
            part_N.view(torch.int32) >> 16 if is_wide else part_N.view(torch.int16).to(torch.int32)
        )
        index_N = bits_N.bitwise_and_(NUM_BINS - 1).to(torch.int64)
        part_V = torch.zeros(NUM_BINS, dtype=torch.int32, device=x_N.device)
        counts_V += part_V.scatter_add_(0, index_N, part_V.new_ones(1).expand(index_N.shape))
    return counts_V


def value_table(dtype: torch.dtype) -> Tensor:
    """The value of each bit pattern of a 16-bit dtype, float64, on the CPU."""
    return _kind(dtype, torch.device("cpu")).table


@dataclass(frozen=True)
class _Kind:
    """The bit patterns of a 16-bit dtype, sorted into finite ones by value, NaN and Inf."""

    order: Tensor
    values: Tensor
    nan: Tensor
    inf: Tensor
    #: The value of each pattern, float64.
    table: Tensor


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
        values_V[index_V],  # patterns with the sign bit come first
    )
    return _Kind(*(part.to(device) for part in parts))


#: Histograms that wait at a time; each takes half a megabyte, and some more while its numbers are computed.
MOST = 32


class Pending:
    """The numbers of one tensor, which are computed when they or those of enough others are asked for."""

    def __init__(self, together: Together, counts_V: Tensor) -> None:
        self._together = together
        #: None once the numbers are computed.
        self.counts: Tensor | None = counts_V
        #: None before.
        self.rows: Rows | None = None
        self.index = 0

    def numbers(self) -> Tensor:
        """The numbers, float64, on the tensor's device."""
        return self._complete().on_device[self.index]

    def on_host(self) -> Tensor:
        """The same in the host's memory; the first one asked for copies those that were computed with it."""
        return self._complete().on_host[self.index]

    def _complete(self) -> Rows:
        self._together.complete(self)
        assert self.rows is not None, "complete"
        return self.rows


class Rows:
    """Numbers that were computed together, [K, ...]."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device

    @cached_property
    def on_host(self) -> Tensor:
        """The same in the host's memory."""
        return self.on_device.cpu()


class Together:
    """Histograms of one dtype on one device, of which `describe` makes numbers: [K, V] to [K, ...].

    May be used by several threads.
    """

    def __init__(self, describe: Callable[[Tensor], Tensor]) -> None:
        self._describe = describe
        self._waiting: list[Pending] = []
        self._lock = threading.Lock()

    def add(self, counts_V: Tensor) -> Pending:
        """Let one more wait."""
        pending = Pending(self, counts_V)
        with self._lock:
            self._waiting.append(pending)
            if len(self._waiting) == MOST:
                self._describe_all()
        return pending

    def complete(self, pending: Pending) -> None:
        """Compute the numbers of all that wait, unless this one has its own."""
        with self._lock:
            if pending.rows is None:
                self._describe_all()

    def _describe_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        counts_KV = torch.stack([each.counts for each in waiting if each.counts is not None])
        rows = Rows(self._describe(counts_KV))
        for index, each in enumerate(waiting):
            each.rows, each.index, each.counts = rows, index, None

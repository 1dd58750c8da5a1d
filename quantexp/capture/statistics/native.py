"""Tensor statistics in compiled code (`statistics.c`): the numbers of `summarise` on a CPU, several times as fast.

    counts of the 65,536 patterns -> moments, quantiles, magnitudes
    MX, in one more pass          -> amax, scale and error of each block

The results equal those of the torch code up to the order of float64 sums, and up to MX sums, for which a lane first
adds up to 95 squares in float32: relative error below 95 * 2^-24, which is 2.5e-5 dB. Unsupported cases (a format of
another family, blocks whose scale is at the ends of the range) use torch.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantexp.capture.statistics.histogram import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    NUM_BINS,
    NUM_EXPONENTS,
    QUANTILES,
    Histogram,
    value_table,
)
from quantexp.compiled import address, library
from quantexp.formats import Family, QuantSpec, encode
from quantexp.formats.layout import INPUT_DTYPES, in_memory_order, memory_order

SOURCE = Path(__file__).with_name("statistics.c")
#: The warning when torch code is used instead.
SLOWER = "statistics are computed by torch, several times slower"
#: Block size of the compiled MX code.
_BLOCK = 32
_NUM_SUMS, _NUM_ERRORS, _NUM_BYTES = 11, 7, 256
_SHARES = np.array(QUANTILES)

# V the 65,536 bit patterns; N the elements of a tensor, in the order in which they lie in memory


class _Format(ctypes.Structure):
    _fields_ = (
        ("mantissa_bits", ctypes.c_int32),
        ("emin", ctypes.c_int32),
        ("max", ctypes.c_float),
        ("zero", ctypes.c_int32),
        ("one", ctypes.c_int32),
        ("step", ctypes.c_uint32),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("wide", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("format", ctypes.c_void_p),
        ("outer", ctypes.c_int64),
        ("extent", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("out_of_range", ctypes.c_int64),
        ("num_values", ctypes.c_int64),
    )


class _Scratch(threading.local):
    """Scratch memory of one thread."""

    def __init__(self) -> None:
        self.room_for(1)

    def room_for(self, num_threads: int) -> None:
        """Allocate the tables for this many torch threads."""
        #: Counts of patterns, zero between calls.
        self.tables = np.zeros((num_threads, 2 * NUM_BINS), np.uint32)
        #: For calls with one tensor: its distinct values, ascending, and their counts.
        self.ordered = np.empty((num_threads, 2, NUM_BINS))


_scratch = _Scratch()


class Kernels:
    """The compiled function."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self.summarise = compiled.summarise
        self.summarise.argtypes = (pointer, whole, pointer, *[whole] * 4, pointer, pointer)
        self.summarise.restype = None


@cache
def kernels() -> Kernels | None:
    """The compiled function; None without a compiler."""
    compiled = library(SOURCE, otherwise=SLOWER).library
    return None if compiled is None else Kernels(compiled)


@dataclass(frozen=True)
class Look:
    """A tensor to summarise, and the format and axis for the fidelity of its blocks, if any."""

    x: Tensor
    spec: QuantSpec | None = None
    axis: int = -1


@dataclass(frozen=True)
class Counted:
    """The result for one tensor."""

    #: NaN, Inf, zeros, `power_sums`, quantiles and magnitudes by exponent, float64.
    numbers: Tensor
    #: For an MX format: signal, noise, energy, counted, non-zero, underflowed and saturated elements, and the number of
    #: blocks for each scale byte. None without a format, or if a block's scale is outside the exact range.
    errors: Tensor | None
    #: The number of distinct values; for float32, of upper halves.
    num_values: int


def counted(kernel: Kernels, looks: Sequence[Look]) -> list[Counted]:
    """Summarise bfloat16, float16 or float32 tensors on a CPU, of any shape and layout, in one call.

    Each tensor must have fewer than 2^32 elements.
    """
    # numpy, because the synchronisation of torch's threads takes longer than this small work.
    numbers = np.empty((len(looks), _NUM_SUMS + len(QUANTILES) + NUM_EXPONENTS))
    errors = np.zeros((len(looks), _NUM_ERRORS + _NUM_BYTES))
    blocks = np.zeros((len(looks), _NUM_BYTES), np.int64)
    jobs = (_Job * len(looks))()
    inputs = [
        _fill(job, look, numbers[row], errors[row], blocks[row])
        for row, (job, look) in enumerate(zip(jobs, looks, strict=True))
    ]
    num_threads = torch.get_num_threads()
    if num_threads > len(_scratch.tables):
        _scratch.room_for(num_threads)
    kernel.summarise(
        ctypes.addressof(jobs),
        len(looks),
        _SHARES.ctypes.data,
        len(QUANTILES),
        LOWEST_EXPONENT,
        HIGHEST_EXPONENT,
        num_threads,
        _scratch.tables.ctypes.data,
        _scratch.ordered.ctypes.data,
    )
    del inputs
    errors[:, _NUM_ERRORS:] = blocks
    by_tensor = zip(jobs, torch.from_numpy(numbers), torch.from_numpy(errors), strict=True)
    return [
        Counted(
            of_tensor, of_blocks if job.format and not job.out_of_range else None, job.num_values
        )
        for job, of_tensor, of_blocks in by_tensor
    ]


def counted_values(kernel: Kernels, look: Look) -> tuple[Counted, Histogram]:
    """`counted` for one tensor, with its histogram; for float32, of the upper halves."""
    result = counted(kernel, [look])[0]
    values, counts = _scratch.ordered[0, :, : result.num_values]
    copies = torch.from_numpy(values.copy()), torch.from_numpy(counts.astype(np.int64))
    is_exact = look.x.dtype != torch.float32
    return result, Histogram(*copies, result.numbers[0], result.numbers[1], is_exact)


def _fill(
    job: _Job,
    look: Look,
    numbers: npt.NDArray[np.float64],
    errors: npt.NDArray[np.float64],
    blocks: npt.NDArray[np.int64],
) -> Tensor:
    """Fill the job of a tensor; returns the elements in memory order, which must stay alive during the call."""
    x = look.x if look.x.ndim else look.x.reshape(1)
    order = memory_order(x)
    dense = in_memory_order(x, order)
    job.x, job.n = address(dense, x.numel(), *INPUT_DTYPES), x.numel()
    job.wide = x.dtype == torch.float32
    if x.dtype == torch.float16:
        job.values = address(value_table(x.dtype), NUM_BINS, torch.float64)
    job.numbers, job.sums, job.blocks = (a.ctypes.data for a in (numbers, errors, blocks))
    if look.spec is not None and takes(x, look.spec):
        job.format = ctypes.addressof(_format(look.spec))
        shape, at = dense.shape, order.index(look.axis % x.ndim)
        job.outer, job.extent, job.inner = (
            math.prod(shape[:at]),
            shape[at],
            math.prod(shape[at + 1 :]),
        )
    return dense


def takes(x: Tensor, spec: QuantSpec) -> bool:
    """Whether the compiled code supports the fidelity of a CPU tensor under this specification."""
    return (
        spec.fmt.family is Family.MX
        and x.dtype in (torch.bfloat16, torch.float32)
        and spec.block == _BLOCK
        and x.numel() > 0
    )


@cache
def _format(spec: QuantSpec) -> _Format:
    element = spec.fmt.element
    zero, one = _byte(0.0, spec), _byte(1.0, spec)
    return _Format(element.mantissa_bits, element.emin, element.max, zero, one, _step(spec))


@cache
def _step(spec: QuantSpec) -> int:
    """The smallest 23-bit mantissa of an amax whose block has a larger scale than that of the power of two below it."""
    low, high = 0, 1 << 23
    while low < high:  # the scale is monotonic in the amax
        middle = (low + high) // 2
        is_larger = _byte(1.0 + middle * 2.0**-23, spec) > _byte(1.0, spec)
        low, high = (low, middle) if is_larger else (middle + 1, high)
    return low


@lru_cache(maxsize=1 << 12)
def _byte(amax: float, spec: QuantSpec) -> int:
    """The E8M0 byte of a block with this float32 amax."""
    x = torch.tensor([amax], dtype=torch.float32)
    _, scales = encode(x, replace(spec, block=1))
    assert isinstance(scales, Tensor), "of one level: the MX family"
    return int(scales)

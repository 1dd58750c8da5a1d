"""CPU kernels in compiled code (`cpu.c`): the reference's values, close to the CPU's memory bandwidth.

They round bfloat16, float16 and float32 to nearest in MX, FP8 and HiF8. The torch code handles stochastic rounding (all
but its random numbers), `pre_scale`, NVFP4, blocks above 256, tensor subclasses and tracing by torch.compile. The
threads are torch's own, as many as `torch.get_num_threads()`, if torch uses OpenMP.

Memory reads and writes, in tensors: 1 and 1 for MX and formats without a tensor scale; 1 more read if the tensor scale
depends on amax; 1 and 2 for two copies along two axes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from quantexp.compiled import address, library
from quantexp.formats.rounding import EXPONENT_MASK, NAN_BITS, rule_offset
from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import is_compiled
from quantexp.formats.types import Family, Rounding

SOURCE = Path(__file__).with_name("cpu.c")
#: Consequence of missing compiled code, for messages.
SLOWER = "tensors are quantised by torch, many times slower"
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Supported format families, with their numbers in the compiled code.
FAMILIES = {Family.MX: 0, Family.FP8: 1, Family.HIF8: 2}
#: The largest block for which one tile fits both a column and a row.
_MAX_BLOCK_OF_BOTH = 64


class _Grid(ctypes.Structure):
    _fields_ = (
        ("mantissa_bits", ctypes.c_int32),
        ("emin", ctypes.c_int32),
        ("emax", ctypes.c_int32),
        ("max", ctypes.c_float),
        ("offset", ctypes.c_uint32),
        ("away", ctypes.c_uint32),
        ("family", ctypes.c_int32),
        ("beyond", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("is_power", ctypes.c_int32),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("extent", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("grid", ctypes.POINTER(_Grid)),
        ("past", ctypes.c_int64),
        ("amax", ctypes.c_uint32),
        ("units", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("work", ctypes.c_void_p),
    )


class _Draw(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("next", ctypes.c_int64),
    )


class Compiled:
    """The compiled functions and their capabilities on this machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        arguments = (ctypes.POINTER(_Job), ctypes.c_int64)
        self.quantise = library.quantise
        self.quantise.argtypes, self.quantise.restype = arguments, None
        self.largest_finite = library.largest_finite
        self.largest_finite.argtypes, self.largest_finite.restype = arguments, ctypes.c_uint32
        self.random_integers = library.random_integers
        self.random_integers.argtypes = (ctypes.POINTER(_Draw), ctypes.c_int64)
        self.random_integers.restype = None
        #: Exact arithmetic in that many of torch's threads (see `exact_in_pool`): whether a mode was changed.
        self.make_threads_exact = library.make_threads_exact
        self.make_threads_exact.argtypes = (ctypes.c_int64,)
        self.make_threads_exact.restype = ctypes.c_int32
        self.restore_threads = library.restore_threads
        self.restore_threads.argtypes, self.restore_threads.restype = (ctypes.c_int64,), None
        num_lanes = library.num_lanes()
        self.dtypes = frozenset(
            dtype for dtype in _DTYPES if dtype is not torch.float16 or num_lanes > 4
        )
        #: Whether torch's threads share the work.
        self.shares_work = bool(library.shares_work())
        vectors = {16: "AVX-512", 8: "AVX2"}.get(num_lanes, "vectors of 128 bits")
        threads = "torch's threads" if self.shares_work else "one thread"
        #: Vector width and threads, for messages.
        self.words = f"{vectors}, {threads}"


@cache
def functions() -> Compiled | None:
    """The compiled functions; None, with one message on stderr, if there is no compiler."""
    compiled = library(SOURCE, otherwise=SLOWER).library
    return None if compiled is None else Compiled(compiled)


def reads(x: Tensor) -> bool:
    """Whether the compiled code accepts such a tensor, with any strides."""
    if x.dtype not in _DTYPES or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    compiled = functions() if x.device.type == "cpu" else None
    return compiled is not None and x.dtype in compiled.dtypes


def claims(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `quantise` is exact for such a tensor."""
    return (
        spec.rounding is not Rounding.STOCHASTIC
        and not spec.is_pre_scaled
        and is_compiled(spec.fmt, spec.block)
        and reads(x)
    )


def claims_both(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `quantise_both` is."""
    is_mx = spec.fmt.family is Family.MX
    return is_mx and spec.block <= _MAX_BLOCK_OF_BOTH and claims(x, spec)


def quantise(x: Tensor, y: Tensor, spec: QuantSpec, axis: int, scale: Tensor | None) -> None:
    """Write the quantised contiguous x to the contiguous y, which may be x; both must be claimed.

    `scale` is the tensor scale, 0-dim float32; None means 1.
    """
    if spec.fmt.family is Family.MX:
        outer, extent, inner = _extents(x.shape, axis)
    else:
        outer, extent, inner = 1, 1, x.numel()
    _run(x, y, None, (outer, extent, inner, inner), spec, scale)


def quantise_both(x: Tensor, columns: Tensor, rows: Tensor, spec: QuantSpec, axis: int) -> None:
    """Write two copies of the contiguous x: in blocks along `axis`, which is not the last, and along the last axis.

    x is read once. Neither copy may be x.
    """
    outer, extent, inner = _extents(x.shape, axis)
    width = x.shape[-1]
    # Rows without a short block are processed as one long row.
    _run(
        x,
        columns,
        rows,
        (outer, extent, inner, width if width % spec.block else inner),
        spec,
        None,
    )


def finite_amax(x_N: Tensor) -> Tensor:
    """The largest magnitude among x's finite elements, 0-dim float32; 0 if there are none. x is contiguous."""
    compiled = functions()
    assert compiled is not None, "claimed"
    x = address(x_N, x_N.numel(), *compiled.dtypes)
    job = _Job(x=x, dtype=_DTYPES[x_N.dtype], inner=x_N.numel())
    bits = compiled.largest_finite(job, torch.get_num_threads()) if x_N.numel() else 0
    amax = struct.unpack("<f", struct.pack("<I", bits))[0]
    return torch.tensor(amax, dtype=torch.float32, device="cpu")


def draws(index: Tensor) -> bool:
    """Whether `draw` accepts these counters."""
    is_real = type(index) is Tensor and not torch.compiler.is_compiling()
    return is_real and index.device.type == "cpu" and functions() is not None


def draw(numbers: Tensor, index: Tensor, seed: int, offset: int) -> None:
    """Write the random numbers of the counters `index`, int64 [...], to the contiguous `numbers`, float32 [..., 4]."""
    compiled = functions()
    assert compiled is not None, "claimed"
    index, count = index.contiguous(), index.numel()
    job = _Draw(
        address(index, count, torch.int64),
        address(numbers, 4 * count, torch.float32),
        *(count, seed, offset),
    )
    compiled.random_integers(job, torch.get_num_threads())


def _extents(shape: torch.Size, axis: int) -> tuple[int, int, int]:
    return math.prod(shape[:axis]), shape[axis] if shape else 1, math.prod(shape[axis + 1 :])


def _run(
    x: Tensor,
    y: Tensor,
    rows: Tensor | None,
    extents: tuple[int, int, int, int],
    spec: QuantSpec,
    scale: Tensor | None,
) -> None:
    compiled = functions()
    assert compiled is not None, "claimed"
    if x.numel() == 0:
        return
    grid = _grid(spec, 1.0 if scale is None else float(scale))
    outer, extent, inner, width = extents
    num_elements = outer * extent * inner
    job = _Job(
        x=address(x, num_elements, *compiled.dtypes),
        y=address(y, num_elements, x.dtype),
        rows=None if rows is None else address(rows, num_elements, x.dtype),
        dtype=_DTYPES[x.dtype],
        outer=outer,
        extent=extent,
        inner=inner,
        width=width,
        block=spec.block,
        grid=ctypes.pointer(grid),
    )
    compiled.quantise(job, torch.get_num_threads())


@lru_cache(maxsize=256)
def _grid(spec: QuantSpec, scale: float) -> _Grid:
    element, is_mx = spec.fmt.element, spec.fmt.family is Family.MX
    infinite = EXPONENT_MASK if element.inf_codes else NAN_BITS
    return _Grid(
        mantissa_bits=element.mantissa_bits,
        emin=element.emin,
        emax=element.emax,
        max=element.max,
        offset=rule_offset(element, spec.scale_rule) if is_mx else 0,
        away=spec.rounding is Rounding.AWAY,
        family=FAMILIES[spec.fmt.family],
        beyond=0 if is_mx or spec.saturate else infinite,
        scale=scale,
        is_power=math.frexp(scale)[0] == 0.5,
    )

"""CPU kernels in compiled code (`cpu.c`): the reference's values, close to the CPU's memory bandwidth.

They round bfloat16, float16 and float32 to the formats that `is_compiled` in `quantexp.formats.table`: to nearest or at
random, with random numbers and a Hadamard transform made beside the rounding. The torch code handles blocks whose scale
is chosen among several, elements that are lists of values, larger blocks, tensor subclasses and tracing by
torch.compile. The threads are torch's own, as many as `torch.get_num_threads()`, if torch uses OpenMP.

Memory reads and writes, in tensors: 1 and 1; 1 more read if the tensor scale depends on amax; 1 and 2 for two copies
along two axes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.compiled import address, library
from quantexp.formats.layout import Draw, Transform, outer_axis_inner
from quantexp.formats.rounding import EXPONENT_MASK, NAN_BITS, rule_offset
from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import BF16, is_compiled, is_usual_mx, panel_fits
from quantexp.formats.types import (
    BlockRule,
    BlockScaleKind,
    Element,
    Family,
    Rounding,
    ScaleRule,
)

SOURCE = Path(__file__).with_name("cpu.c")
#: Consequence of missing compiled code, for messages.
SLOWER = "tensors are quantised by torch, many times slower"
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Families without blocks whose scale multiplies elements, with their numbers in the compiled code.
_FLAT = {Family.FP8: 1, Family.HIF8: 2}
#: Supported format families.
FAMILIES = frozenset({Family.MX, Family.NV, Family.GRID, *_FLAT})
#: Block scales and rules in the compiled code; 4 stands for one scale for all elements.
_KINDS = {kind: number for number, kind in enumerate(BlockScaleKind)}
_CONSTANT = 4
_RULES = {BlockRule.EXACT: 0, BlockRule.FLOOR: 1, BlockRule.CEIL: 2}
#: The largest block of which a panel holds both a column and a row.
_MAX_BLOCK_OF_BOTH = 128
#: The largest block that 16-bit integers serve.
_MAX_BLOCK_OF_INTEGERS = 256
#: Signs of a transform are repeated to the length of a vector.
_LEAST_SIGNS = 16


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type."""
    return [(name, kind) for name in names.split()]


class Grid(ctypes.Structure):
    """A number format, and how to round to it: `grid` of job.h."""

    _fields_ = (
        *fields(ctypes.c_int32, "mantissa_bits emin emax"),
        *fields(ctypes.c_float, "max lowest"),
        *fields(ctypes.c_uint32, "away"),
        *fields(ctypes.c_int32, "has_negative_zero family"),
        *fields(ctypes.c_uint32, "beyond"),
        *fields(ctypes.c_float, "scale"),
        *fields(ctypes.c_int32, "is_power"),
        *fields(ctypes.c_float, "pre_scale"),
        *fields(ctypes.c_int32, "is_divided kind rule"),
        *fields(ctypes.c_uint32, "offset"),
        *fields(ctypes.c_int32, "scale_mantissa_bits scale_emin"),
        *fields(ctypes.c_float, "scale_min scale_max"),
        *fields(ctypes.c_int32, "tensor_first is_random in_integers"),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x y rows"),
        *fields(ctypes.c_int64, "dtype outer extent inner width tall wide"),
        *fields(ctypes.POINTER(Grid), "grid"),
        *fields(ctypes.c_int64, "hadamard is_down is_left"),
        *fields(ctypes.c_void_p, "signs"),
        *fields(ctypes.c_uint64, "seed offset"),
        *fields(ctypes.c_void_p, "starts"),
        *fields(ctypes.c_int64, "length past"),
        *fields(ctypes.c_uint32, "amax"),
        *fields(ctypes.c_int64, "units step next"),
        *fields(ctypes.c_void_p, "work"),
    )


class Compiled:
    """The compiled functions and their capabilities on this machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        arguments = (ctypes.POINTER(_Job), ctypes.c_int64)
        self.quantise = library.quantise
        self.quantise.argtypes, self.quantise.restype = arguments, None
        self.largest_finite = library.largest_finite
        self.largest_finite.argtypes, self.largest_finite.restype = arguments, ctypes.c_uint32
        self.random_numbers = library.random_numbers
        self.random_numbers.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.random_numbers.restype = None
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


def claims(x: Tensor, spec: QuantSpec, transform: Transform | None = None) -> bool:
    """Whether `quantise` is exact for such a tensor, after a transform if there is one."""
    if not is_compiled(spec.fmt, spec.block) or spec.rounding is Rounding.ZERO or not reads(x):
        return False
    if spec.rounding is Rounding.STOCHASTIC and not x.is_contiguous():
        return False  # numbers follow the order of indices
    if spec.fmt.across > 1 and (x.ndim not in (1, 2) or not x.numel()):
        return False
    return transform is None or fits_transform(x, spec, transform)


def fits_transform(x: Tensor, spec: QuantSpec, transform: Transform) -> bool:
    """Whether a panel of whole blocks has whole blocks of the transform as well."""
    in_blocks = spec.fmt.block is not None and spec.fmt.across == 1
    return in_blocks and x.ndim > 0 and panel_fits(math.lcm(spec.block, transform.block))


def claims_both(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `quantise_both` is."""
    is_blocked = spec.fmt.block is not None and spec.fmt.across == 1
    is_small = is_blocked and spec.block <= _MAX_BLOCK_OF_BOTH
    return is_small and spec.rounding is not Rounding.STOCHASTIC and claims(x, spec)


def quantise(
    x: Tensor,
    y: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None,
    draw: Draw | None = None,
    transform: Transform | None = None,
) -> None:
    """Write the quantised contiguous x to the contiguous y, which may be x; both must be claimed.

    `scale` is the tensor scale, 0-dim float32; None means 1. `draw` is for stochastic rounding.
    """
    if x.numel():
        job, kept = _job(x, spec, axis, transform)
        _write(job, x, y, spec, scale, draw)
        del kept


def quantise_both(
    x: Tensor,
    columns: Tensor,
    rows: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None = None,
) -> None:
    """Write two copies of the contiguous x: in blocks along `axis`, which is not the last, and along the last axis.

    x is read once. Neither copy may be x. `scale` is as in `quantise`.
    """
    if not x.numel():
        return
    job, _ = _job(x, spec, axis, None, is_down=True)
    job.rows = address(rows, x.numel(), x.dtype)
    # Rows without a short block are processed as one long row.
    job.width = x.shape[-1] if x.shape[-1] % spec.block else job.inner
    _write(job, x, columns, spec, scale, None)


def finite_amax(x: Tensor, axis: int = 0, transform: Transform | None = None) -> Tensor:
    """The largest magnitude among x's finite elements, 0-dim float32; 0 if there are none. x is contiguous.

    With a transform along `axis`, it is that of the transform of x.
    """
    compiled = functions()
    assert compiled is not None, "claimed"
    bits = 0
    if x.numel():
        job, kept = _job(x, None, axis, transform)
        bits = compiled.largest_finite(job, torch.get_num_threads())
        del kept
    amax = struct.unpack("<f", struct.pack("<I", bits))[0]
    return torch.tensor(amax, dtype=torch.float32, device="cpu")


def _job(
    x: Tensor,
    spec: QuantSpec | None,
    axis: int,
    transform: Transform | None,
    is_down: bool = False,
) -> tuple[_Job, Tensor | None]:
    """The work on x, not empty, in the blocks of a specification; the second result must live as long as it.

    Blocks run down the extent if the axis is not the last, or if `is_down`.
    """
    compiled = functions()
    assert compiled is not None, "claimed"
    outer, extent, inner = outer_axis_inner(tuple(x.shape), axis)
    block, across = 1, 1
    is_blocked = spec is not None and spec.fmt.block is not None
    if spec is not None and is_blocked:
        block, across = spec.block, spec.fmt.across
    is_down = is_down or inner > 1
    if not is_blocked and transform is None:
        outer, extent, inner, tall, wide = 1, 1, x.numel(), 1, 1
    elif is_down:
        tall, wide = block, across
    else:
        outer, extent, inner, tall, wide = 1, outer, extent, across, block
        grain = wide if transform is None else math.lcm(wide, transform.block)
        if tall == 1 and inner % grain == 0:
            extent, inner = 1, extent * inner
    job = _Job(
        x=address(x, x.numel(), *compiled.dtypes),
        dtype=_DTYPES[x.dtype],
        outer=outer,
        extent=extent,
        inner=inner,
        width=inner,
        tall=tall,
        wide=wide,
    )
    if transform is None:
        return job, None
    job.hadamard, job.is_down, job.is_left = transform.block, is_down, transform.left
    signs = transform.signs
    if signs is not None:
        repeats = _LEAST_SIGNS // transform.block
        signs = signs.repeat(repeats) if repeats > 1 else signs.contiguous()
        job.signs = address(signs, signs.numel(), torch.float32)
    return job, signs


def _write(
    job: _Job, x: Tensor, y: Tensor, spec: QuantSpec, scale: Tensor | None, draw: Draw | None
) -> None:
    compiled = functions()
    assert compiled is not None, "claimed"
    grid = grid_of(spec, 1.0 if scale is None else float(scale))
    job.y, job.grid = address(y, x.numel(), x.dtype), ctypes.pointer(grid)
    starts = None
    if draw is not None:
        job.seed, job.offset = draw.seed, draw.offset
        if draw.place is not None:
            starts, job.length = draw.place.row_starts(x.shape, x.device), x.shape[-1]
            job.starts = address(starts, starts.numel(), torch.int64)
    elif grid.family:
        job.tall = 0
    compiled.quantise(job, torch.get_num_threads())


@lru_cache(maxsize=256)
def grid_of(spec: QuantSpec, scale: float) -> Grid:
    """The number format as kernels read it, under a scale of the tensor."""
    fmt, element = spec.fmt, spec.fmt.element
    family = _FLAT.get(fmt.family, 0)
    infinite = EXPONENT_MASK if element.inf_codes else NAN_BITS
    grid = Grid(
        mantissa_bits=element.mantissa_bits,
        emin=element.emin,
        emax=element.emax,
        max=element.max,
        lowest=element.max if element.lowest is None else -element.lowest,
        away=spec.rounding is Rounding.AWAY,
        has_negative_zero=element.has_negative_zero,
        family=family,
        beyond=infinite if family and not spec.saturate else 0,
        scale=scale,
        is_power=math.frexp(scale)[0] == 0.5,
        pre_scale=spec.pre_scale,
        kind=_CONSTANT,
        is_divided=not family,
        tensor_first=fmt.family is Family.GRID,
        is_random=spec.rounding is Rounding.STOCHASTIC,
    )
    if fmt.family is Family.MX:
        _set_powers(grid, element, spec.scale_rule)
        grid.in_integers = _in_integers(spec)
    elif fmt.family is Family.NV:
        _set_scales(grid, BlockScaleKind.FLOAT, BlockRule.EXACT, fmt.block_scale)
    elif fmt.grid_scale is not None and fmt.grid_scale.kind is BlockScaleKind.E8M0:
        _set_powers(grid, element, ScaleRule(fmt.grid_scale.rule.value))
    elif fmt.grid_scale is not None:
        of_kind = {BlockScaleKind.BF16: BF16, BlockScaleKind.FP32: BF16}
        own = fmt.grid_scale.element or of_kind[fmt.grid_scale.kind]
        _set_scales(grid, fmt.grid_scale.kind, fmt.grid_scale.rule, own)
    return grid


def _set_powers(grid: Grid, element: Element, rule: ScaleRule) -> None:
    grid.kind = _KINDS[BlockScaleKind.E8M0]
    grid.offset = rule_offset(element, rule)
    grid.is_divided = grid.scale != 1.0


def _set_scales(grid: Grid, kind: BlockScaleKind, rule: BlockRule, element: Element | None) -> None:
    assert element is not None
    grid.kind, grid.rule = _KINDS[kind], _RULES[rule]
    grid.scale_mantissa_bits, grid.scale_emin = element.mantissa_bits, element.emin
    is_small = kind is BlockScaleKind.FLOAT
    grid.scale_min = 2.0 ** (element.emin - (element.mantissa_bits if is_small else 0))
    grid.scale_max = element.max


def _in_integers(spec: QuantSpec) -> bool:
    """Whether the code in 16-bit integers has tables for bfloat16 in this format of MX."""
    is_usual = spec.block & (spec.block - 1) == 0 and spec.block <= _MAX_BLOCK_OF_INTEGERS
    is_nearest = spec.rounding is Rounding.EVEN and not spec.is_pre_scaled
    return is_usual and is_nearest and is_usual_mx(spec.fmt.element)

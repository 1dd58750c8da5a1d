"""Compares an operand of 16-bit numbers with the images of its source by tables, in compiled code (`tables.c`).

An element's image depends on its code and on its block's amax, or on the code alone in a format without blocks. So one
pass finds the distinct amaxes of all blocks; the images of all codes that lie in such a block are computed as those of
any tensor (`under`); and a second pass looks up the image of every element. Blocks with equal factors d share a row of
the table, and codes too small for an image of their own share the entry of the largest of them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from quantexp.compiled import address, compiled
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Element, Scaling
from quantexp.proof.arithmetic.layout import extents, memory_order
from quantexp.proof.arithmetic.rounding import under
from quantexp.proof.arithmetic.scales import divisors_of, finite_amax, is_of_amax, tensor_scale

SOURCE = Path(__file__).with_name("tables.c")
#: Elements of an operand from which a table is worth its computation, and elements for each of its entries.
_FEWEST, _FEWEST_OF_ENTRY = 1 << 16, 8
_MAGNITUDES = 1 << 15
_SIGN = -(1 << 15)


class _Job(ctypes.Structure):
    _fields_ = (
        ("operand", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("outer", ctypes.c_int64),
        ("extent", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("amax", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("images", ctypes.c_void_p),
        ("infinity", ctypes.c_uint16),
    )


class _Functions:
    """The compiled functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        arguments = (ctypes.POINTER(_Job),)
        self.find_amaxes = library.find_amaxes
        self.find_amaxes.argtypes, self.find_amaxes.restype = arguments, None
        self.count_in_blocks = library.count_in_blocks
        self.count_in_blocks.argtypes, self.count_in_blocks.restype = arguments, ctypes.c_int64
        self.count_each = library.count_each
        self.count_each.argtypes, self.count_each.restype = arguments, ctypes.c_int64


@cache
def _functions() -> _Functions | None:
    """The compiled functions; None without a compiler, of which the kernels that quantise inform the user."""
    library = compiled(SOURCE).library
    return None if library is None else _Functions(library)


def has_tables(x: Tensor, spec: QuantSpec) -> bool:
    """Whether `num_differing` may count the elements of such a source."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() >= _FEWEST
        and not spec.draws
        and not spec.is_transformed
        and is_of_amax(spec)
        and _functions() is not None
    )


@exact_in_pool
def num_differing(
    x: Tensor, operand: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None
) -> int | None:
    """The number of elements of an operand that are not the images of x; None if its table would be too large."""
    order = list(range(x.ndim)) if spec.fmt.across > 1 and x.ndim > 2 else memory_order(x)
    x, operand = (tensor.detach().permute(order).contiguous() for tensor in (x, operand))
    known = None if amax is None else float(amax)
    if spec.fmt.block is None:
        return _num_each(x, operand, spec, known)
    return _num_in_blocks(x, operand, spec, order.index(axis), known)


def _num_each(x: Tensor, operand: Tensor, spec: QuantSpec, amax: float | None) -> int:
    if amax is None:
        amax = float(finite_amax(x)) if spec.scaling is not Scaling.NONE else 0.0
    codes = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16)
    images = _images(codes, x.dtype, spec, _scalar(tensor_scale(spec, amax)))
    job = _Job(
        operand=address(operand, x.numel(), x.dtype),
        source=address(x, x.numel(), torch.bfloat16, torch.float16),
        extent=x.numel(),
        images=address(images, 1 << 16, torch.int16),
        infinity=_infinity(x.dtype),
    )
    functions = _functions()
    assert functions is not None, "has_tables"
    return int(functions.count_each(job))


def _num_in_blocks(
    x: Tensor, operand: Tensor, spec: QuantSpec, axis: int, amax: float | None
) -> int | None:
    outer, extent, inner = extents(x.shape, axis)
    block = min(spec.block, extent)
    amaxes = torch.empty(outer, -(-extent // block), inner, dtype=torch.int16, device="cpu")
    num_blocks = amaxes.numel()
    seen = torch.zeros(_MAGNITUDES, dtype=torch.bool, device="cpu")
    job = _Job(
        operand=address(operand, x.numel(), x.dtype),
        source=address(x, x.numel(), torch.bfloat16, torch.float16),
        outer=outer,
        extent=extent,
        inner=inner,
        block=block,
        amax=address(amaxes, num_blocks, torch.int16),
        seen=address(seen, _MAGNITUDES, torch.bool),
        infinity=_infinity(x.dtype),
    )
    functions = _functions()
    assert functions is not None, "has_tables"
    functions.find_amaxes(job)
    codes = seen.nonzero().view(-1).to(torch.int16)
    if amax is None:
        is_finite = int(codes[-1]) < job.infinity
        largest = codes[-1].view(x.dtype) if is_finite else finite_amax(x)
        amax = float(largest)
    t = _scalar(tensor_scale(spec, amax))
    table = _table(codes, x.dtype, spec, t, x.numel() // _FEWEST_OF_ENTRY)
    if table is None:
        return None
    if spec.fmt.across > 1:
        amaxes = _of_tiles(amaxes, spec.fmt.across)
    job.amax = address(amaxes, num_blocks, torch.int16)
    job.images = address(table.images, table.images.numel(), torch.int16)
    job.low = address(table.low, _MAGNITUDES, torch.int16)
    job.first = address(table.first, _MAGNITUDES, torch.int32)
    return int(functions.count_in_blocks(job))


def _of_tiles(amaxes_OBI: Tensor, across: int) -> Tensor:
    """The amaxes of blocks of several rows, repeated for each of their rows."""
    amaxes_RB = amaxes_OBI.transpose(1, 2).flatten(0, 1)
    rows = amaxes_RB.shape[0]
    padded = torch.nn.functional.pad(amaxes_RB, (0, 0, 0, -rows % across))
    largest = padded.view(-1, across, padded.shape[1]).amax(dim=1)
    repeated = largest.repeat_interleave(across, dim=0)[:rows]
    o, b, i = amaxes_OBI.shape
    return repeated.view(o, i, b).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Table:
    """The images of all codes in blocks with certain amaxes; see `tables.c`."""

    low: Tensor
    first: Tensor
    images: Tensor


def _table(
    codes: Tensor, dtype: torch.dtype, spec: QuantSpec, t: Tensor, most: int
) -> _Table | None:
    """The table for blocks with these amaxes (codes, ascending); None if it has more than `most` entries.

    A block with NaN or Inf has a row of two entries: both are NaN.
    """
    factors = divisors_of(codes.view(dtype).float(), spec, t)
    d, row_of = torch.unique(factors.masked_fill(factors.isnan(), -1.0), return_inverse=True)
    is_row = d >= 0
    high = torch.zeros(d.numel(), dtype=torch.int32, device="cpu").scatter_reduce_(
        0, row_of, codes.int(), "amax", include_self=True
    )
    low = _smallest(d, dtype, spec.fmt.element).where(is_row, _MAGNITUDES - 1)
    low = torch.minimum(low, high.where(is_row, _MAGNITUDES - 1))
    width = int((high.where(is_row, 0) - low).amax()) + 1 if is_row.any() else 1
    if 2 * width * d.numel() > most:
        return None
    magnitudes_RW = (low[:, None] + torch.arange(width, device="cpu")).clamp_max_(_MAGNITUDES - 1)
    pairs_RWS = torch.stack((magnitudes_RW, magnitudes_RW + _SIGN), dim=-1).to(torch.int16)
    d_R11 = d.where(is_row, math.nan).view(-1, 1, 1)
    first = torch.arange(d.numel(), dtype=torch.int32, device="cpu") * (2 * width) - 2 * low
    lows_M = torch.zeros(_MAGNITUDES, dtype=torch.int16, device="cpu")
    firsts_M = torch.zeros(_MAGNITUDES, dtype=torch.int32, device="cpu")
    lows_M[codes.long()], firsts_M[codes.long()] = low[row_of].to(torch.int16), first[row_of]
    return _Table(lows_M, firsts_M, _images(pairs_RWS, dtype, spec, d_R11))


def _smallest(d: Tensor, dtype: torch.dtype, element: Element) -> Tensor:
    """The code of a magnitude at and below which all have one image: half of that of the first tie."""
    pairs = pairwise(element.values)
    tie = min(
        (abs(low + high) / 2 for low, high in pairs),
        default=2.0 ** (element.emin - element.mantissa_bits - 1),
    )
    return (d.double() * (tie / 2)).to(dtype).view(torch.int16).int()


def _images(codes: Tensor, dtype: torch.dtype, spec: QuantSpec, d: Tensor) -> Tensor:
    """The codes of the images of codes, int16, under the factors d."""
    values = codes.contiguous().view(dtype).float()
    return under(values, d, spec, None).to(dtype).view(torch.int16)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _infinity(dtype: torch.dtype) -> int:
    return int(torch.tensor(math.inf, dtype=dtype, device="cpu").view(torch.int16))

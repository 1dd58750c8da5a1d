"""The scales of a quantised tensor, without its codes.

They equal those of `encode`, byte for byte, and are computed from each block's amax alone: rounding does not affect
them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.declared.arithmetic import block_factors, grid_chunks
from quantexp.formats.declared.levels import factors_of_blocks
from quantexp.formats.encoding import (
    Scales,
    TwoLevelScales,
    check_has_codes,
    for_operator,
    magnitude_code,
    of_operator,
    or_one,
    shapes_of_scales,
)
from quantexp.formats.families import block_scales, tensor_scale
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import blocked_shape, num_tiles, outer_axis_inner, to_tiles
from quantexp.formats.operators import operator, spec_of, text_of, with_blocks_of_examples
from quantexp.formats.rounding import (
    EXPONENT_MASK,
    MAGNITUDE_MASK,
    MANTISSA_BITS,
    as_bits,
    scale_field,
)
from quantexp.formats.spec import AnySpec, QuantSpec, resolve
from quantexp.formats.torch_internals import checked_axis, constant, is_plain
from quantexp.formats.types import Family


def scales_of(x: Tensor, fmt: AnySpec, *, axis: int = -1, amax: Tensor | None = None) -> Scales:
    """The scales that `encode` returns: uint8 for MX, `TwoLevelScales` for NVFP4, else 0-dim float32.

    Of a declared format of the family `grid`, which has no codes, the factor of each block, float32; [blocks across,
    blocks along] for blocks of several rows. 1 for a format in Python.

    Block scales have x's shape with the extent n of `axis` replaced by ceil(n / block); for a block with NaN or Inf the
    byte is 0xFF, for NVFP4 0x7F.

    Raises:
        ValueError: as for `encode`.
    """
    axis = checked_axis(x, axis, amax)
    if is_plain(x, amax):
        return _scales(constant(x), resolve(fmt), axis, amax)
    return of_operator(_operator(x.detach(), text_of(fmt, has_amax=amax is not None), axis, amax))


@exact_in_pool
def zero_blocks(x: Tensor, spec: QuantSpec, *, axis: int) -> Tensor:
    """Whether each block has only zeros: bool, of the shape of the scales. NaN and Inf are none."""
    x = x if x.ndim else x.reshape(1)
    if spec.fmt.across > 1:
        amax_T = to_tiles(x, spec.fmt, axis).abs().amax(-1)
        return (amax_T == 0).reshape(num_tiles(tuple(x.shape), spec.fmt, axis))
    return _block_amax(x, axis % x.ndim, spec.scale_block) == 0


@exact_in_pool
def _scales(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Scales:
    if spec.fmt.family is Family.PYTHON:
        return or_one(None, x)
    if spec.fmt.family is Family.GRID:
        return _of_grid(x, axis, spec, tensor_scale(x, spec, amax))
    check_has_codes(spec.fmt)
    scale = tensor_scale(x, spec, amax)
    if spec.fmt.family is Family.MX:
        return _of_blocks(x, axis, spec, None)
    if spec.fmt.family is Family.NV:
        return TwoLevelScales(_of_blocks(x, axis, spec, scale), or_one(scale, x))
    return or_one(scale, x)


def _of_operator(x: Tensor, spec: str, axis: int, amax: Tensor | None) -> list[Tensor]:
    return for_operator(_scales(x, spec_of(spec), axis, amax))


def _shapes_of_operator(x: Tensor, spec: str, axis: int, amax: object) -> list[Tensor]:
    check_has_codes(spec_of(spec).fmt)
    return shapes_of_scales(x, spec, axis)


_operator = operator(
    "scales_of",
    "(Tensor x, str spec, int axis, Tensor? amax) -> Tensor[]",
    _of_operator,
    _shapes_of_operator,
    with_blocks_of_examples,
)


def _of_blocks(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    amax = _block_amax(x if x.ndim else x.reshape(1), axis, spec.block)
    codes = _codes(as_bits(amax).bitwise_and_(MAGNITUDE_MASK), spec, scale)
    return codes.to(torch.uint8).reshape(blocked_shape(x.shape, axis, spec.block))


def _of_grid(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    if spec.fmt.block is None:
        return or_one(None if scale is None else scale.reciprocal(), x)
    x = x if x.ndim else x.reshape(1)
    if spec.fmt.grid_scale is not None and spec.fmt.grid_scale.each:
        return _of_several(x, axis, spec, scale)
    shape: tuple[int, ...] = blocked_shape(tuple(x.shape), axis, spec.block)
    if spec.fmt.across > 1:
        shape = num_tiles(tuple(x.shape), spec.fmt, axis)
        x = to_tiles(x, spec.fmt, axis)
        spec, axis = replace(spec, block=x.shape[-1]), 1
    d = torch.empty(blocked_shape(tuple(x.shape), axis, spec.block), device=x.device)
    x_ONI = x.reshape(outer_axis_inner(tuple(x.shape), axis))
    d_OBI = d.view(outer_axis_inner(tuple(d.shape), axis))
    for chunk in grid_chunks(x_ONI, spec):
        chunk.scales(d_OBI).copy_(
            block_factors(chunk.elements(x_ONI).to(torch.float32), spec, scale)
        )
    return d.view(shape)


def _of_several(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    """d of each of the blocks that a block of the format has, before their correction."""
    outer, extent, inner = outer_axis_inner(tuple(x.shape), axis)
    size = max(1, min(spec.block, extent))
    padded = torch.nn.functional.pad(
        x.reshape(outer, extent, inner).float(), (0, 0, 0, -extent % size)
    )
    d = factors_of_blocks(padded.view(outer, -1, size, inner), spec, scale).flatten(1, 2)
    shape = blocked_shape(tuple(x.shape), axis, spec.scale_block)
    return d[:, : shape[axis]].reshape(shape)


def _block_amax(x: Tensor, axis: int, block: int) -> Tensor:
    """The largest magnitude of each block, float32; NaN of either sign if it contains NaN."""
    extent = x.shape[axis]
    whole = extent // block * block
    blocks = torch.unflatten(x.narrow(axis, 0, whole), axis, (whole // block, block))
    parts = [blocks.abs().amax(axis + 1).to(torch.float32)]
    if whole < extent:
        rest = x.narrow(axis, whole, extent - whole)
        parts.append(rest.abs().amax(axis, keepdim=True).to(torch.float32))
    return torch.cat(parts, axis)  # in float32: autocast refuses to join float16


def _codes(amax_bits: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    element = spec.fmt.block_scale
    if element is None:
        field = scale_field(amax_bits, spec.fmt.element, spec.scale_rule)
        return field >> MANTISSA_BITS
    (nan_code,) = element.nan_codes
    code = magnitude_code(block_scales(amax_bits, spec.fmt, scale), element)
    return code.masked_fill_(amax_bits >= EXPONENT_MASK, nan_code)

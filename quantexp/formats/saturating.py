"""Finds the elements of a tensor that lie beyond the largest value of their grid.

That is |x| > max 2^s for a block of MX, |x| > max b t for one of NVFP4, and |x s| > max without blocks; with
`pre_scale`, that part of |x| replaces |x|. An element between the largest value and half a step beyond it counts,
although unlimited rounding would give the same value. In a block with NaN or Inf nothing counts; without blocks Inf
counts and NaN does not. Of a format in Python nothing counts, as its largest value is not known.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.declared.arithmetic import block_factors, grid_chunks
from quantexp.formats.declared.levels import factors, factors_of_elements
from quantexp.formats.families import (
    block_amax_bits,
    block_scales,
    tensor_scale,
    total_scale,
)
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import (
    chunk_limit,
    chunks,
    from_tiles,
    outer_axis_inner,
    to_tiles,
)
from quantexp.formats.operators import operator, spec_of, text_of, with_blocks_of_examples
from quantexp.formats.rounding import EXPONENT_MASK, can_saturate, power_of_two, scale_field
from quantexp.formats.spec import AnySpec, QuantSpec, resolve
from quantexp.formats.torch_internals import checked_axis, constant, is_plain
from quantexp.formats.types import Element, Family


def saturated(x: Tensor, fmt: AnySpec, *, axis: int = -1, amax: Tensor | None = None) -> Tensor:
    """Whether each element of x lies beyond the largest value of its grid, bool of x's shape.

    Raises:
        ValueError: as for `quantise`.
    """
    axis = checked_axis(x, axis, amax)
    if is_plain(x, amax):
        return _saturated(constant(x), resolve(fmt), axis, amax)
    beyond: Tensor = _operator(x.detach(), text_of(fmt, has_amax=amax is not None), axis, amax)
    return beyond


@exact_in_pool
def _saturated(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor:
    if spec.fmt.family is Family.PYTHON:
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    scale = tensor_scale(x, spec, amax)
    if spec.fmt.family is Family.GRID:
        return _in_grid(x, axis, spec, scale)
    if spec.scale_rule is not None and not can_saturate(spec.scale_rule):
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if spec.fmt.family in (Family.MX, Family.NV):
        return _in_blocks(x.contiguous(), axis, spec, scale)
    v = x.float() if scale is None else x.float() * scale
    return v.abs() > spec.fmt.element.max


def _of_operator(x: Tensor, spec: str, axis: int, amax: Tensor | None) -> Tensor:
    return _saturated(x, spec_of(spec), axis, amax).contiguous()


def _shape_of_operator(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


_operator = operator(
    "saturated",
    "(Tensor x, str spec, int axis, Tensor? amax) -> Tensor",
    _of_operator,
    _shape_of_operator,
    with_blocks_of_examples,
)


def _in_blocks(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    beyond = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    extents = outer_axis_inner(x.shape, axis)
    x_ONI, beyond_ONI = x.view(extents), beyond.view(extents)
    for chunk in chunks(extents, spec.block, chunk_limit(x.device)):
        magnitude = torch.empty(chunk.elements(x_ONI).shape, dtype=torch.float32, device=x.device)
        x32 = torch.empty_like(magnitude).copy_(chunk.elements(x_ONI))
        amax_bits = block_amax_bits(x32, magnitude)
        limit = spec.fmt.element.max * _block_scale(amax_bits, spec, scale)
        if spec.is_pre_scaled:
            magnitude.mul_(spec.pre_scale)
        chunk.elements(beyond_ONI).copy_((magnitude > limit) & (amax_bits < EXPONENT_MASK))
    return beyond


def _in_grid(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    if spec.fmt.across > 1 and x.ndim:
        tiles = to_tiles(x, spec.fmt, axis)
        of_tile = replace(spec, fmt=replace(spec.fmt, across=1), block=tiles.shape[-1])
        return from_tiles(_in_grid(tiles, 1, of_tile, scale), tuple(x.shape), spec.fmt, axis)
    x_ONI = x.reshape(outer_axis_inner(tuple(x.shape), axis))
    beyond_ONI = torch.empty(x_ONI.shape, dtype=torch.bool, device=x.device)
    for chunk in grid_chunks(x_ONI, spec):
        part = chunk.elements(x_ONI).to(torch.float32)
        if spec.fmt.grid_scale is None:
            d, which = block_factors(part, spec, scale), None
        elif spec.fmt.grid_scale.each:
            d, which = factors_of_elements(part, spec, scale)
        else:
            d, which = factors(part, spec, scale)
        is_beyond = _is_beyond(part, d, spec.fmt.element)
        if which is not None:
            assert spec.fmt.grid_scale is not None, "several elements"
            for number, element in enumerate(spec.fmt.grid_scale.others, 1):
                is_beyond = torch.where(which == number, _is_beyond(part, d, element), is_beyond)
        chunk.elements(beyond_ONI).copy_(is_beyond)
    return beyond_ONI.view(x.shape)


def _is_beyond(x: Tensor, d: Tensor, element: Element) -> Tensor:
    lowest = -element.max if element.lowest is None else element.lowest
    return (x > element.max * d) | (x < lowest * d)


def _block_scale(amax_bits: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    """The factor of each block's elements; undefined if amax is NaN or Inf."""
    if spec.fmt.block_scale is None:
        return power_of_two(scale_field(amax_bits, spec.fmt.element, spec.scale_rule))
    return total_scale(block_scales(amax_bits, spec.fmt, scale), scale)

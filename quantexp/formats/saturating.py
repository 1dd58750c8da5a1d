"""Finds the elements of a tensor that lie beyond the largest value of their grid.

That is |x| > max 2^s for a block of MX, |x| > max b t for one of NVFP4, and |x s| > max without blocks; with
`pre_scale`, 3/4 |x| replaces |x|. An element between the largest value and half a step beyond it counts, although
unlimited rounding would give the same value. In a block with NaN or Inf nothing counts; without blocks Inf counts and
NaN does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.bits import EXPONENT_MASK, power_of_two
from quantexp.formats.layout import (
    check_input,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.mx import PRE_SCALE, block_amax_bits
from quantexp.formats.mx_scale import scale_field
from quantexp.formats.nv import block_scales, total_scale
from quantexp.formats.options import Options, resolve
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Family, Format, ScaleRule, Scaling


@torch.no_grad()
def saturated(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    scaling: Scaling | str | None = None,
    amax_target: float | None = None,
    amax: Tensor | None = None,
    pre_scale: bool = False,
) -> Tensor:
    """Whether each element of x lies beyond the largest value of its grid, bool of x's shape.

    Raises:
        ValueError: as for `quantise`.
    """
    options = resolve(
        fmt,
        block=block,
        scale_rule=scale_rule,
        scaling=scaling,
        amax_target=amax_target,
        has_amax=amax is not None,
        pre_scale=pre_scale,
    )
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    x = x.detach()
    scale = tensor_scale(x, options, amax)
    if options.fmt.family in (Family.MX, Family.NV):
        return _in_blocks(x.contiguous(), axis, options, scale)
    v = x.float() if scale is None else x.float() * scale
    return v.abs() > options.fmt.element.max


def _in_blocks(x: Tensor, axis: int, options: Options, scale: Tensor | None) -> Tensor:
    beyond = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    extents = outer_axis_inner(x.shape, axis)
    x_ONI, beyond_ONI = x.view(extents), beyond.view(extents)
    for chunk in chunks(extents, options.block, chunk_limit(x.device)):
        magnitude = torch.empty(chunk.elements(x_ONI).shape, dtype=torch.float32, device=x.device)
        x32 = torch.empty_like(magnitude).copy_(chunk.elements(x_ONI))
        amax_bits = block_amax_bits(x32, magnitude)
        limit = options.fmt.element.max * _block_scale(amax_bits, options, scale)
        if options.pre_scale:
            magnitude.mul_(PRE_SCALE)
        chunk.elements(beyond_ONI).copy_((magnitude > limit) & (amax_bits < EXPONENT_MASK))
    return beyond


def _block_scale(amax_bits: Tensor, options: Options, scale: Tensor | None) -> Tensor:
    """The factor of each block's elements; undefined if amax is NaN or Inf."""
    if options.fmt.block_scale is None:
        return power_of_two(scale_field(amax_bits, options.fmt.element, options.scale_rule))
    return total_scale(block_scales(amax_bits, options.fmt, scale), scale)

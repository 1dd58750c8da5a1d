"""Gradient estimators: derivatives that training takes in the place of that of rounding.

The differentiable gradient estimator of FP4 training (DGE, arXiv 2501.17116, equation 8):

Rounding has the derivative 0 almost everywhere; straight-through training takes 1. DGE takes that of a smooth step
between neighbouring values l and h of the element's grid: for an element v = x / scale between them and a power k

    f'(v) = |2 (v - l) / (h - l) - 1|^(1/k - 1) / k        at most 3

so that an element near a value of the grid gets less of the gradient, and one near a tie more. k = 1 would be straight
through; the paper takes 5. Beyond the largest value it is 0, as in the authors' code (Azure/MS-AMP,
`differentiable_quantize_derivative`). An element of a block with NaN or Inf has 1. `noise_slopes` is for the loss of
randomly rounded weights (LOTION, arXiv 2510.08757).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats.codes import code_values
from quantexp.formats.declared.arithmetic import block_factors, grid_chunks
from quantexp.formats.families import (
    SCALED_VALUES,
    block_amax_bits,
    known_scales,
    tensor_scale,
    total_scale,
)
from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import chunk_limit, from_tiles, outer_axis_inner, to_tiles
from quantexp.formats.rounding import power_of_two, scale_field
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Element, Family

#: The largest derivative, in the paper and in the authors' code.
MOST = 3.0


@exact_in_pool
def dge_factors(x: Tensor, spec: QuantSpec, power: float, axis: int, amax: Tensor | None) -> Tensor:
    """f' of each element of x, float32 of x's shape; `axis`, counted from the front, and `amax` as in `quantise`.

    Of formats whose values are known, and whose blocks have one scale, which follows from their amax.
    """
    v = in_units(x, spec, axis, tensor_scale(x, spec, amax)).reshape(-1)
    limit = chunk_limit(x.device)
    for start in range(0, v.numel(), limit):
        part = v[start : start + limit]
        part.copy_(_derivative(part.double(), spec.fmt.element, power))
    return v.view(x.shape)


@exact_in_pool
def noise_slopes(x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None) -> Tensor:
    """The derivative of the variance of stochastic rounding at each element of x, float32; arguments as `dge_factors`.

    With v = x / scale between l and h, neighbouring values of the format, the variance is scale^2 (v - l) (h - v), and
    its derivative by x under a constant scale

        scale (l + h - 2 v)

    0 at a value of the format, where it jumps, from the largest on, and in a block with NaN or Inf.
    """
    units = in_units(x, spec, axis, tensor_scale(x, spec, amax)).reshape(-1)
    grid = _magnitudes(spec.fmt.element, x.device)
    flat, limit = x.reshape(-1), chunk_limit(x.device)
    for start in range(0, units.numel(), limit):
        part = units[start : start + limit]
        v = part.double().abs_()
        above = torch.searchsorted(grid, v, right=True).clamp_(1, grid.numel() - 1)
        low, high = grid[above - 1], grid[above]
        is_flat = (v == low) | (v >= grid[-1]) | ~v.isfinite()
        own = flat[start : start + limit].double()
        slopes = (low + high - v * 2).mul_(own / v)
        part.copy_(slopes.masked_fill_(is_flat, 0.0))
    return units.view(x.shape)


def in_units(x: Tensor, spec: QuantSpec, axis: int, scale: Tensor | None) -> Tensor:
    """x over the scale of its block and of its tensor, float32, in new memory; NaN in a block with NaN or Inf."""
    if spec.fmt.family in SCALED_VALUES:
        return x.float().mul(1.0 if scale is None else scale)
    if spec.fmt.across > 1 and x.ndim:
        tiles = to_tiles(x, spec.fmt, axis)
        of_tile = replace(spec, fmt=replace(spec.fmt, across=1), block=tiles.shape[-1])
        own = in_units(tiles, of_tile, 1, scale)
        return from_tiles(own, tuple(x.shape), spec.fmt, axis).contiguous()
    x_ONI = x.reshape(outer_axis_inner(tuple(x.shape), axis))
    units_ONI = torch.empty(x_ONI.shape, dtype=torch.float32, device=x.device)
    for chunk in grid_chunks(x_ONI, spec):
        part = chunk.elements(x_ONI).to(torch.float32)
        chunk.elements(units_ONI).copy_(part / _factors(part, spec, scale))
    return units_ONI.view(x.shape)


def _factors(x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    """What the codes of each block are multiplied by, with extent 1 along K; NaN for a block with NaN or Inf."""
    if spec.fmt.family is Family.GRID:
        return block_factors(x_OBKI, spec, scale)
    amax_bits = block_amax_bits(x_OBKI, torch.empty_like(x_OBKI))
    if spec.fmt.family is Family.MX:
        return power_of_two(scale_field(amax_bits, spec.fmt.element, spec.scale_rule))
    return total_scale(known_scales(amax_bits, spec.fmt, scale), scale)


def _derivative(v: Tensor, element: Element, power: float) -> Tensor:
    """f' of v, float64, which is overwritten."""
    grid = _magnitudes(element, v.device)
    v.abs_()
    above = torch.searchsorted(grid, v, right=True).clamp_(1, grid.numel() - 1)
    low, high = grid[above - 1], grid[above]
    t = ((v - low) * 2 / (high - low) - 1).abs_()
    slope = t.pow_(1 / power - 1).div_(power).clamp_max_(MOST)
    return slope.masked_fill_(v > grid[-1], 0.0).masked_fill_(~v.isfinite(), 1.0)


@lru_cache(maxsize=32)
def _magnitudes(element: Element, device: torch.device) -> Tensor:
    """The finite magnitudes of an element, ascending, float64."""
    values = {abs(value) for value in code_values(element) if abs(value) < float("inf")}
    return torch.tensor(sorted(values), dtype=torch.float64, device=device)

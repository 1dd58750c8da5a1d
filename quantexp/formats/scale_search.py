"""Searches for the scale under which a tensor fits best on the grid of a format with a scale per tensor.

    current  (and delayed) rounding may carry amax across the power of two that determined the scale. The candidates are
             the scale that the tensor gives, half and twice that; the one that fits most elements wins. Equality is
             exact, as powers of two are.
    exact    the scale is only known up to a rounding error, hence a tolerance (`_exact_tolerance`).

NVFP4's block scales are unknown too. A block's largest element is one of the element's seven values times its scale.
The candidates are the scales that these values give, from the largest value on; the first that fits the whole block
wins. For rounding to nearest that is the first, 6 (or 4 and less if the block's scale is one of E4M3's first
subnormals). For stochastic rounding or pre-scaling by 3/4 it may be 4, and so may the largest element of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats.bits import EXPONENT_MASK, as_bits
from quantexp.formats.codes import code_values
from quantexp.formats.hif8 import spacing_to
from quantexp.formats.layout import chunk_limit, chunks, outer_axis_inner
from quantexp.formats.nv import nearest_scale, total_scale
from quantexp.formats.per_tensor import quantise_flat
from quantexp.formats.rounding import round_magnitudes
from quantexp.formats.spec import QuantSpec
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Element, Family, Scaling

#: One rounding of float32.
_FLOAT32_UNIT = 2.0**-24
#: Candidate factors of NVFP4's tensor scale relative to the one that the tensor gives; 1.5 is 6 / 4.
_FACTORS = {
    Scaling.CURRENT: (1.0, 0.5, 2.0),
    Scaling.DELAYED: (1.0, 0.5, 2.0),
    Scaling.EXACT: (1.0, 1.5),
}


@dataclass(frozen=True)
class Fit:
    """The elements that lie on the grid at a scale."""

    on_grid: Tensor
    #: A 0-dim float32 tensor, None without scaling.
    scale: Tensor | None

    @property
    def count(self) -> int:
        """The number of elements on the grid."""
        return int(self.on_grid.sum())


@dataclass(frozen=True)
class BlockFit(Fit):
    """The elements that lie on the grid at a tensor scale and block scales."""

    #: The grid's spacing around each element, float32.
    steps: Tensor


def same(x: Tensor, y: Tensor) -> Tensor:
    """Where two tensors are equal, counting NaN as equal to NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def fit_flat(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> Fit:
    """The fit of a format without blocks; `amax` replaces x's own, as in `quantise`."""
    scale = tensor_scale(x, spec, amax)
    if scale is None:
        return Fit(same(x, _requantised(x, spec, None)), None)
    if spec.scaling is Scaling.EXACT:
        return _near_flat_grid(x, spec, scale)
    best = Fit(same(x, _requantised(x, spec, scale)), scale)
    for factor in (0.5, 2.0):
        if best.count == x.numel():
            break
        fit = Fit(same(x, _requantised(x, spec, scale * factor)), scale * factor)
        best = max(best, fit, key=lambda candidate: candidate.count)
    return best


def _requantised(x: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    dense = x.contiguous()
    result = torch.empty_like(dense)
    quantise_flat(dense.view(-1), result.view(-1), spec, scale)
    return result


def _near_flat_grid(x: Tensor, spec: QuantSpec, scale: Tensor) -> Fit:
    """The fit for a scale that is known only up to a rounding error, as for `fit_flat`.

    The largest element was rounded to e(target) / s, so that value replaces the target in the comparison with amax; if
    the target is halfway between two values, both are candidates.
    """
    target = torch.tensor([spec.amax_target], dtype=torch.float32, device=x.device)
    beside = torch.cat([target * (1 - 2.0**-20), target * (1 + 2.0**-20)])
    rounded = torch.unique(_requantised(beside, spec, None).clamp_max_(spec.fmt.element.max))
    fits = [_near_flat_grid_at(x, spec, scale * ratio) for ratio in rounded / target]
    return max(fits, key=lambda candidate: candidate.count)


def _near_flat_grid_at(x: Tensor, spec: QuantSpec, scale: Tensor) -> Fit:
    relative, absolute = _exact_tolerance(x.dtype)
    on_grid = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    most = chunk_limit(x.device)
    # In strips, whose float32 intermediates stay in the cache.
    strips = (torch.split(each, most) for each in (x.reshape(-1), on_grid.view(-1)))
    for part, on_grid_part in zip(*strips, strict=True):
        v = part.to(torch.float32) * scale
        grid = _requantised(v, spec, None)
        near = (v - grid).abs() <= grid.abs() * relative + absolute * scale
        on_grid_part.copy_(near | same(v, grid))
    return Fit(on_grid, scale)


def _exact_tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """The largest distance of x s from the grid if x = e(x0 s0) / s0 and x's amax gives s.

    With u the dtype's unit roundoff and w = 2^-24 float32's: an element is q / s0 (1 + a) with |a| <= u + w (one
    division, one rounding to the dtype), and so is amax; s takes up to three roundings and x s one. To first order that
    is 2 (u + w) + 4 w, and one part in 64 covers the products of errors. Below the dtype's normal range an element is
    off by half a subnormal step instead.
    """
    info = torch.finfo(dtype)
    unit = info.eps / 2
    relative = (2 * (unit + _FLOAT32_UNIT) + 4 * _FLOAT32_UNIT) * (1 + 1 / 64)
    return relative, info.tiny * info.eps / 2


def flat_steps(x32: Tensor, scale: Tensor | None, spec: QuantSpec) -> Tensor:
    """The spacing around each element (float32) of a format without blocks."""
    v = x32 if scale is None else x32 * scale
    if spec.fmt.family is Family.HIF8:
        step = torch.empty_like(v)
        spacing_to(step, v, torch.empty_like(v))
    else:
        step = binade_steps(v.abs(), spec.fmt.element)
    return step if scale is None else step.div_(scale)


def binade_steps(magnitude: Tensor, element: Element) -> Tensor:
    """The element's spacing in the binade of each magnitude (float32), in a new tensor."""
    step = torch.bitwise_and(as_bits(magnitude), EXPONENT_MASK).view(torch.float32)
    return step.clamp_min_(2.0**element.emin).mul_(2.0**-element.mantissa_bits)


def fit_blocks(x: Tensor, axis: int, spec: QuantSpec, amax: Tensor | None) -> BlockFit:
    """The fit of NVFP4 with blocks along `axis`, counted from the front.

    If less than a quarter of the elements fit, no other tensor scale is tried: of normal data about 0.4 fit under a
    scale that is off by a factor of 1.5, 0.9 under one off by 2, and of data that is not quantised 0.08.
    """
    scale = tensor_scale(x, spec, amax)
    if scale is None:
        return _fit_blocks_at(x, axis, spec, None)
    best = None
    for factor in _FACTORS[spec.scaling]:
        fit = _fit_blocks_at(x, axis, spec, scale * factor)
        best = fit if best is None else max(best, fit, key=lambda candidate: candidate.count)
        if best.count == x.numel() or 4 * best.count < x.numel():
            break
    assert best is not None
    return best


def _fit_blocks_at(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> BlockFit:
    extents = outer_axis_inner(x.shape, axis)
    dense = x.contiguous()
    on_grid = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    steps = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    x_ONI, on_ONI, steps_ONI = (t.view(extents) for t in (dense, on_grid, steps))
    tolerance = _block_tolerance(x.dtype, spec)
    for chunk in chunks(extents, spec.block, chunk_limit(x.device)):
        part_OBKI = chunk.elements(x_ONI).to(torch.float32)
        near, step = _fit_chunk(part_OBKI, spec, scale, tolerance)
        chunk.elements(on_ONI).copy_(near)
        chunk.elements(steps_ONI).copy_(step)
    return BlockFit(on_grid, scale, steps)


def _block_tolerance(dtype: torch.dtype, spec: QuantSpec) -> tuple[float, float]:
    """The largest relative distance of x / d from the element's grid, and absolute distance of x from its value.

    A power-of-two scale leaves at most six significant bits, which every dtype represents. Otherwise x was rounded once
    to the dtype (u), and d, computed from x's amax, is known up to eight roundings of float32: one each of
    amax / target, b t and q d, then and now, and two of x / d.
    """
    info = torch.finfo(dtype)
    if spec.scaling is not Scaling.EXACT:
        return 0.0, info.tiny * info.eps / 2
    relative = (info.eps / 2 + 8 * _FLOAT32_UNIT) * (1 + 1 / 64)
    return relative, info.tiny * info.eps / 2


def _fit_chunk(
    x_OBKI: Tensor, spec: QuantSpec, scale: Tensor | None, tolerance: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Which elements fit, and the step around each; each block uses the first scale that fits all of it.

    If the first two scales fit no block except all-zero ones, no other is tried.
    """
    element, b_element = spec.fmt.element, spec.fmt.block_scale
    assert b_element is not None
    magnitude = x_OBKI.abs()
    amax_OB1I = magnitude.amax(dim=2, keepdim=True)
    near = step = done = torch.empty(0)
    for number, largest in enumerate(_largest_first(element)):
        ratio = amax_OB1I / largest
        block_scale = nearest_scale(ratio if scale is None else ratio / scale, b_element)
        total = total_scale(block_scale, scale)
        fits, grid = _near_element(magnitude, total, element, tolerance)
        steps = binade_steps(grid, element).mul_(total)
        whole = fits.all(dim=2, keepdim=True)
        if number == 0:
            near, step, done = fits, steps, whole
        else:
            take = whole & ~done
            near, step = torch.where(take, fits, near), torch.where(take, steps, step)
            done = done | whole
        if bool(done.all()) or (number == 1 and not bool((done & (amax_OB1I > 0)).any())):
            break
    finite = amax_OB1I.isfinite()
    step = step.masked_fill(magnitude == 0, 0.0).masked_fill_(~finite, torch.nan)
    return (near & finite) | x_OBKI.isnan(), step


def _largest_first(element: Element) -> list[float]:
    """The element's positive finite values, largest first."""
    return sorted((v for v in code_values(element) if 0 < v < torch.inf), reverse=True)


def _near_element(
    magnitude: Tensor, total: Tensor, element: Element, tolerance: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Whether magnitude / total lies near the element's grid, and the grid value."""
    relative, absolute = tolerance
    grid = (magnitude / total).clamp_max_(element.max)
    round_magnitudes(grid, element, torch.empty_like(grid))
    value = grid * total
    return (magnitude - value).abs() <= value * relative + absolute, grid

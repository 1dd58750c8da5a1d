"""Searches for the scale under which a tensor fits best on the grid of a format with a scale per tensor.

    current  (and delayed) rounding may carry amax across the power of two that determined the scale. The candidates are
             the scale that the tensor gives, half and twice that; the one that fits most elements wins. Equality is
             exact, as powers of two are.
    exact    the scale is only known up to a rounding error, hence a tolerance (`_exact_tolerance`).

NVFP4's block scales are unknown too. A block's largest element is one of the element's seven values times its scale.
The candidates are the scales that these values give, from the largest value on; the first that fits the whole block
wins. For rounding to nearest that is the first, 6 (or 4 and less if the block's scale is one of E4M3's first
subnormals). For stochastic rounding or pre-scaling it may be 4, and so may the largest element of the tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from quantexp.formats.codes import code_values
from quantexp.formats.families import nearest_scale, tensor_scale, total_scale
from quantexp.formats.layout import chunk_limit, chunks, outer_axis_inner
from quantexp.formats.quantising import quantise_dense
from quantexp.formats.rounding import round_magnitudes
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Element, Scaling

#: One rounding of float32.
_FLOAT32_UNIT = 2.0**-24
#: Candidate factors of a tensor scale relative to the one that the tensor gives.
_FACTORS = {Scaling.CURRENT: (1.0, 0.5, 2.0), Scaling.DELAYED: (1.0, 0.5, 2.0)}
#: The same of NVFP4; 1.5 is 6 / 4.
_BLOCK_FACTORS = _FACTORS | {Scaling.EXACT: (1.0, 1.5)}


def same(x: Tensor, y: Tensor) -> Tensor:
    """Where two tensors are equal, counting NaN as equal to NaN."""
    equal = x == y
    return equal if bool(equal.all()) else equal | (x.isnan() & y.isnan())


def fit_flat(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> Tensor:
    """The elements on the grid of a format without blocks; `amax` replaces x's own, as in `quantise`."""
    return _best(_fits_flat(x, spec, amax))


def _fits_flat(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> Iterator[Tensor]:
    """Those at each scale that `fit_flat` may choose."""
    scales = _flat_scales(x, spec, amax)
    if scales is None:
        yield same(x, _requantised(x, spec, None))
    elif spec.scaling is Scaling.EXACT:
        yield from (_near_flat_grid_at(x, spec, scale) for scale in scales)
    else:
        yield from (same(x, _requantised(x, spec, scale)) for scale in scales)


def _flat_scales(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> Tensor | None:
    """The scales [S] that a tensor may have been quantised with."""
    scale = tensor_scale(x, spec, amax)
    if scale is None:
        return None
    factors = _exact_ratios(spec) if spec.scaling is Scaling.EXACT else _FACTORS[spec.scaling]
    return scale.new_tensor(factors) * scale


def _best(fits: Iterator[Tensor]) -> Tensor:
    """The first of those with the most elements on the grid; none is tried after one with all."""
    best = next(fits)
    most = int(best.sum())
    while most < best.numel() and (fit := next(fits, None)) is not None:
        if (count := int(fit.sum())) > most:
            best, most = fit, count
    return best


def _requantised(x: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    dense = x.contiguous()
    result = torch.empty_like(dense)
    quantise_dense(dense.view(-1), result.view(-1), spec, 0, scale, None)
    return result


@cache
def _exact_ratios(spec: QuantSpec) -> tuple[float, ...]:
    """The scales that an exact one may have been, relative to the one that the quantised tensor gives.

    The largest element was rounded to e(target) / s, so that value replaces the target in the comparison with amax; if
    the target is halfway between two values, both are candidates.
    """
    target = torch.tensor([spec.amax_target], dtype=torch.float32, device="cpu")
    beside = torch.cat([target * (1 - 2.0**-20), target * (1 + 2.0**-20)])
    rounded = _requantised(beside, spec, None).clamp_max_(spec.fmt.element.max)
    return tuple((torch.unique(rounded) / target).tolist())


def _near_flat_grid_at(x: Tensor, spec: QuantSpec, scale: Tensor) -> Tensor:
    relative, absolute = _exact_tolerance(x.dtype)
    on_grid = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    most = chunk_limit(x.device)
    # In strips, whose float32 intermediates stay in the cache.
    strips = (torch.split(each, most) for each in (x.reshape(-1), on_grid.view(-1)))
    for part, on_grid_part in zip(*strips, strict=True):
        v = part.to(torch.float32) * scale
        grid = _requantised(v, spec, None)
        near = (v - grid).abs() <= grid.abs() * relative + absolute * scale
        on_grid_part.copy_(near if bool(near.all()) else near | same(v, grid))
    return on_grid


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


def fit_blocks(x: Tensor, axis: int, spec: QuantSpec, amax: Tensor | None) -> Tensor:
    """The elements on the grid of NVFP4 with blocks along `axis`, counted from the front.

    If less than a quarter of the elements fit, no other tensor scale is tried: of normal data about 0.4 fit under a
    scale that is off by a factor of 1.5, 0.9 under one off by 2, and of data that is not quantised 0.08.
    """
    fits = _fits_blocks(x, axis, spec, amax)
    first = next(fits)
    return first if 4 * int(first.sum()) < x.numel() else _best(itertools.chain([first], fits))


def _fits_blocks(x: Tensor, axis: int, spec: QuantSpec, amax: Tensor | None) -> Iterator[Tensor]:
    """Those at each tensor scale that `fit_blocks` may choose."""
    scale = tensor_scale(x, spec, amax)
    if scale is None:
        yield _fit_blocks_at(x, axis, spec, None)
    else:
        yield from (
            _fit_blocks_at(x, axis, spec, scale * each) for each in _BLOCK_FACTORS[spec.scaling]
        )


def _fit_blocks_at(x: Tensor, axis: int, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    extents = outer_axis_inner(x.shape, axis)
    dense = x.contiguous()
    on_grid = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    x_ONI, on_ONI = dense.view(extents), on_grid.view(extents)
    tolerance = _block_tolerance(x.dtype, spec)
    for chunk in chunks(extents, spec.block, chunk_limit(x.device)):
        part_OBKI = chunk.elements(x_ONI).to(torch.float32)
        chunk.elements(on_ONI).copy_(_fit_chunk(part_OBKI, spec, scale, tolerance))
    return on_grid


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
    x_OBKI: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    tolerance: tuple[float, float],
) -> Tensor:
    """Which elements fit; each block uses the first scale that fits all of it.

    A block that fits with v as its largest element also fits with 2 v and half the scale, unless the half is subnormal,
    which has fewer bits.
    """
    x_KOBI = x_OBKI.movedim(2, 0)
    x_KN = x_KOBI.reshape(len(x_KOBI), -1).contiguous()
    magnitude = x_KN.abs()
    amax_N = magnitude.amax(dim=0)
    values = _largest_first(spec.fmt.element)
    near, is_whole, is_normal = _fit_to(magnitude, amax_N / values[0], spec, scale, tolerance)
    is_left = ~is_whole
    for largest in values[1:]:
        if 2 * largest in values:
            is_left &= ~is_normal
        left = is_left.nonzero()[:, 0]
        if not len(left):
            break
        ratio = amax_N[left] / largest
        _, whole, _ = _fit_to(magnitude[:, left], ratio, spec, scale, tolerance)
        near[:, left[whole]], is_left[left[whole]] = True, False
    finite = amax_N.isfinite()
    if not finite.all():
        near = (near & finite) | x_KN.isnan()
    return near.view(x_KOBI.shape).movedim(0, 2)


def _fit_to(
    magnitude_KN: Tensor,
    ratio_N: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    tolerance: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the block scale nearest to each ratio: the elements that fit, and the blocks that fit whole.

    The last result is whether the block scale is a normal number before it is rounded.
    """
    element, b_element = spec.fmt.element, spec.fmt.block_scale
    assert b_element is not None
    ratio_N = ratio_N if scale is None else ratio_N / scale
    is_normal = ratio_N >= 2.0**b_element.emin
    total = total_scale(nearest_scale(ratio_N, b_element), scale)
    near = _near_element(magnitude_KN, total, element, tolerance)
    # Of bytes, the minimum over blocks takes a tenth of the time that `all` takes.
    is_whole = near.view(torch.uint8).amin(dim=0).view(torch.bool)
    return near, is_whole, is_normal


@cache
def _largest_first(element: Element) -> list[float]:
    """The element's positive finite values, largest first."""
    return sorted((v for v in code_values(element) if 0 < v < torch.inf), reverse=True)


def _near_element(
    magnitude: Tensor, total: Tensor, element: Element, tolerance: tuple[float, float]
) -> Tensor:
    """Whether magnitude / total lies near the element's grid."""
    relative, absolute = tolerance
    grid = (magnitude / total).clamp_max_(element.max)
    round_magnitudes(grid, element, torch.empty_like(grid))
    value = grid * total
    return (magnitude - value).abs() <= value * relative + absolute

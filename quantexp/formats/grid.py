"""Whether a tensor lies on a format's grid, and how fine that grid is, its scales not being known.

They are recomputed from the tensor itself:

    MX       quantising is idempotent, so a tensor is on the grid where quantising it again
             changes nothing.
    current  rounding may carry amax across the power of two that decided s, so s, s / 2 and 2 s
             are tried and the one that fits most elements is taken; equality is exact, as s is.
    exact    s is only known to a rounding error, hence a tolerance (`_exact_tolerance`).

A tensor can lie on a grid by chance: of bf16 values about 1 in 16 lies on an 8-bit grid, 1 in 80 on
E2M1's. Grids of neighbouring scales share most of their values, so blocks along another axis are
told by single elements that miss, not by the share that fits. How much a fit says depends on
`local_step` against the step of the dtype. Shards need the amax over the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats.bits import (
    EXPONENT_MASK,
    as_bits,
    inverse_power_of_two,
    power_of_two,
)
from quantexp.formats.hif8 import quantise_hif8, spacing_to
from quantexp.formats.layout import (
    Scratch,
    check_input,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.mx import block_amax_bits, scratch_size
from quantexp.formats.options import Options, resolve
from quantexp.formats.quantising import quantise
from quantexp.formats.scale import scale_field
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Element, Family, Format, ScaleRule, Scaling


@torch.no_grad()
def lies_on_grid(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    scaling: Scaling | str = Scaling.NONE,
    amax_target: float | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Whether each element is a value that quantising could have left there, bool of x's shape.

    Zeros of either sign are on every grid. NaN is on the grid of HiF8 and bf16, and of MX where
    its whole block is NaN; Inf is on that of HiF8 and bf16, and never on MX's, where it stems
    from a product beyond the dtype. All else in an MX block with NaN or Inf is not.

    Raises:
        ValueError: as `quantise`.
    """
    options = _resolve(fmt, block, scale_rule, scaling, amax_target, amax)
    check_input(x)
    x = x.detach()
    match options.fmt.family:
        case Family.HIF8:
            return _on_hif8_grid(x, options, amax).on_grid
        case Family.MX:
            again = quantise(x, fmt, axis=axis, block=block, scale_rule=scale_rule)
        case Family.BF16:
            again = quantise(x, fmt, axis=axis)
    return _same(x, again)


@torch.no_grad()
def local_step(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    scaling: Scaling | str = Scaling.NONE,
    amax_target: float | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """The spacing of the grid around each element, at its block's scale, float32 of x's shape.

    0 where the element is 0; NaN where it, or anything in its MX block, is NaN or Inf. The
    spacing is that of the element's binade; a power of two belongs to the binade above it.

    Raises:
        ValueError: as `quantise`.
    """
    options = _resolve(fmt, block, scale_rule, scaling, amax_target, amax)
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    x32 = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    match options.fmt.family:
        case Family.MX:
            _mx_steps(x32, axis, options)
            return x32
        case Family.HIF8:
            step = _hif8_steps(x32, _on_hif8_grid(x.detach(), options, amax).scale)
        case Family.BF16:
            step = _binade_steps(x32.abs(), options.fmt.element)
    return step.masked_fill_(x32 == 0, 0.0).masked_fill_(~x32.isfinite(), torch.nan)


def _resolve(
    fmt: str | Format,
    block: int | None,
    scale_rule: ScaleRule | str | None,
    scaling: Scaling | str,
    amax_target: float | None,
    amax: Tensor | None,
) -> Options:
    options = resolve(
        fmt,
        block=block,
        scale_rule=scale_rule,
        scaling=scaling,
        amax_target=amax_target,
        has_amax=amax is not None,
    )
    if options.fmt.family is not Family.HIF8:
        return options
    return resolve(options.fmt, scaling=scaling, amax_target=amax_target, saturate=False)


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


@dataclass(frozen=True)
class _Fit:
    """Which elements lie on the HiF8 grid at which scale."""

    on_grid: Tensor
    #: a 0-dim float32 tensor, None for no scaling.
    scale: Tensor | None


def _on_hif8_grid(x: Tensor, options: Options, amax: Tensor | None) -> _Fit:
    scale = tensor_scale(x, options, amax)
    if scale is None:
        return _Fit(_same(x, _again(x, options, None)), None)
    if options.scaling is Scaling.EXACT:
        return _near_hif8_grid(x, options, scale)
    best = _Fit(_same(x, _again(x, options, scale)), scale)
    most = int(best.on_grid.sum())
    for factor in (0.5, 2.0):
        if most == x.numel():
            break
        fit = _Fit(_same(x, _again(x, options, scale * factor)), scale * factor)
        if (count := int(fit.on_grid.sum())) > most:
            best, most = fit, count
    return best


def _again(x: Tensor, options: Options, scale: Tensor | None) -> Tensor:
    dense = x.contiguous()
    again = torch.empty_like(dense)
    quantise_hif8(dense.view(-1), again.view(-1), options, scale)
    return again


def _near_hif8_grid(x: Tensor, options: Options, scale: Tensor) -> _Fit:
    """As `_on_hif8_grid`, for a scale that is known to a rounding error only.

    The largest element was rounded to hif8(target) / s, so that, not the target, is what amax is
    measured against.
    """
    target = torch.tensor([options.amax_target], dtype=torch.float32, device=x.device)
    scale = scale * (_again(target, options, None)[0] / target[0])
    v = x.to(torch.float32) * scale
    grid = _again(v, options, None)
    relative, absolute = _exact_tolerance(x.dtype)
    near = (v - grid).abs() <= grid.abs() * relative + absolute * scale
    return _Fit(near | _same(v, grid), scale)


def _exact_tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """How far x s can lie from the grid if x = hif8(x0 s0) / s0 and s follows from x's amax.

    With u the dtype's unit roundoff and w = 2^-24 float32's: an element is q / s0 (1 + a) with
    |a| <= u + w (one division, one rounding to the dtype), and so is amax; forming s takes up to
    three roundings and x s one. To first order that is 2 (u + w) + 4 w, and one part in 64 covers
    the products of errors. Below the dtype's normal range an element is off by half a subnormal
    step instead.
    """
    info = torch.finfo(dtype)
    unit, float32_unit = info.eps / 2, 2.0**-24
    relative = (2 * (unit + float32_unit) + 4 * float32_unit) * (1 + 1 / 64)
    return relative, info.tiny * info.eps / 2


def _mx_steps(x32: Tensor, axis: int, options: Options) -> None:
    """Overwrite x (float32, contiguous) with the step at each element."""
    extents = outer_axis_inner(x32.shape, axis)
    x_ONI = x32.view(extents)
    limit = chunk_limit(x32.device)
    scratch = Scratch(scratch_size(x_ONI, options.block, limit), x32.device)
    for chunk in chunks(extents, options.block, limit):
        x_OBKI = chunk.elements(x_ONI)
        copy, magnitude, _ = scratch.of_shape(x_OBKI.shape)
        copy.copy_(x_OBKI)
        amax_bits = block_amax_bits(copy, magnitude)
        field = scale_field(amax_bits, options.fmt.element, options.scale_rule)
        is_zero = magnitude == 0
        step = _binade_steps(magnitude.mul_(inverse_power_of_two(field)), options.fmt.element)
        x_OBKI.copy_(step.masked_fill_(is_zero, 0.0).mul_(power_of_two(field)))


def _hif8_steps(x32: Tensor, scale: Tensor | None) -> Tensor:
    step, scratch = torch.empty_like(x32), torch.empty_like(x32)
    if scale is None:
        spacing_to(step, x32, scratch)
        return step
    spacing_to(step, x32 * scale, scratch)
    return step.div_(scale)


def _binade_steps(magnitude: Tensor, element: Element) -> Tensor:
    """The element's spacing in the binade of each magnitude (float32), in a new tensor."""
    step = torch.bitwise_and(as_bits(magnitude), EXPONENT_MASK).view(torch.float32)
    return step.clamp_min_(2.0**element.emin).mul_(2.0**-element.mantissa_bits)

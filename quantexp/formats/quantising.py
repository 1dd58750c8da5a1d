"""A tensor with its values moved to the grid of a number format, in its own shape and dtype.

All arithmetic is float32 and exact but for the rounding to the grid; the product of a grid value
and its scale is rounded once more to the tensor's dtype, which changes nothing but values beyond
its largest finite (they become Inf): where the grid is finer than the dtype, so was the input.
Subnormals are never flushed, unless torch was told to (`torch.set_flush_denormal`). What it does
not do: keep track of gradients (see `quantexp.quant`), round stochastically.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.hif8 import quantise_hif8
from quantexp.formats.layout import (
    check_input,
    inverse,
    memory_order,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.mx import quantise_mx
from quantexp.formats.options import Options, resolve
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Family, Format, Rounding, ScaleRule, Scaling


@torch.no_grad()
def quantise(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    block: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    scaling: Scaling | str = Scaling.NONE,
    amax_target: float | None = None,
    amax: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The tensor x with its values on the format's grid, in its own shape and dtype.

    MX: blocks of `block` (None: 32) elements lie along `axis`, the last may be short. NaN or Inf
    anywhere in a block makes the whole block NaN; a zero block keeps its zeros; signed zeros keep
    their sign. HiF8: NaN stays, Inf stays or becomes 32768 / s when saturating, there is no
    negative zero; `axis` has no effect. bf16: nearest even, `axis` has no effect.

    Args:
        x: bfloat16, float16 or float32, of any shape and strides.
        fmt: a name (see `quantexp.formats.table`) or a format.
        axis: the axis that blocks run along.
        block: MX, elements of a block, a power of two.
        scale_rule: MX, how scales follow from amax; None is floor.
        rounding: where ties go; None is even for MX and away for HiF8.
        saturate: HiF8, whether what is too large becomes the largest finite value, not Inf.
        scaling: HiF8, the scale of the whole tensor.
        amax_target: HiF8, where `scaling` brings amax to; None is 15.
        amax: HiF8, 0-dim, the amax to scale by in place of x's largest finite magnitude.
        out: where to write, of x's shape and dtype; it may be x itself.

    Raises:
        ValueError: for an unknown format, an option the format does not have, a value that is not
            allowed, and a dtype, axis or `out` that does not fit.
    """
    options = resolve(
        fmt,
        block=block,
        scale_rule=scale_rule,
        rounding=rounding,
        saturate=saturate,
        scaling=scaling,
        amax_target=amax_target,
        has_amax=amax is not None,
    )
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    _check_out(x, out)
    x = x.detach()
    scale = tensor_scale(x, options, amax)
    order = memory_order(x)
    dense = x.permute(order).contiguous()
    target = None if out is None else out.detach().permute(order)
    in_place = target is not None and target.is_contiguous()
    y = target if target is not None and in_place else torch.empty_like(dense)
    _quantise_dense(dense, y, options, order.index(axis) if order else 0, scale)
    if out is None:
        return y.permute(inverse(order))
    if not in_place:
        out.detach().copy_(y.permute(inverse(order)))
    return out


def _quantise_dense(
    x: Tensor, y: Tensor, options: Options, axis: int, scale: Tensor | None
) -> None:
    match options.fmt.family:
        case Family.MX:
            extents = outer_axis_inner(x.shape, axis)
            quantise_mx(x.view(extents), y.view(extents), options)
        case Family.HIF8:
            quantise_hif8(x.view(-1), y.view(-1), options, scale)
        case Family.BF16:
            y.copy_(x.to(torch.bfloat16))


def _check_out(x: Tensor, out: Tensor | None) -> None:
    if out is None:
        return
    for name in ("shape", "dtype", "device"):
        wanted, got = getattr(x, name), getattr(out, name)
        if wanted != got:
            raise ValueError(f"out must have x's {name} {wanted}, got {got}")

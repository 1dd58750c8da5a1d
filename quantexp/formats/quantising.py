"""A tensor with its values moved to the grid of a number format, in its own shape and dtype.

All arithmetic is float32 and exact but for the rounding to the grid; the product of a grid value
and its scale is rounded once more to the tensor's dtype, which changes nothing but values beyond
its largest finite (they become Inf): where the grid is finer than the dtype, so was the input.
Subnormals are never flushed, unless torch was told to (`torch.set_flush_denormal`). What it does
not do: keep track of gradients (see `quantexp.quant`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.kernels.choice import kernel_for
from quantexp.formats.layout import (
    Target,
    check_input,
    check_out,
    memory_order,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.mx import quantise_mx
from quantexp.formats.nv import quantise_nv
from quantexp.formats.options import Options, resolve
from quantexp.formats.per_tensor import quantise_flat
from quantexp.formats.philox import Place, random_numbers
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
    scaling: Scaling | str | None = None,
    amax_target: float | None = None,
    amax: Tensor | None = None,
    seed: int | None = None,
    offset: int | None = None,
    pre_scale: bool = False,
    out: Tensor | None = None,
    place: Place | None = None,
) -> Tensor:
    """The tensor x with its values on the format's grid, in its own shape and dtype.

    MX and NVFP4: blocks of `block` elements (None: 32, and 16) lie along `axis`, the last may be
    short. NaN or Inf anywhere in a block makes the whole block NaN; a zero block keeps its zeros;
    signed zeros keep their sign. FP8: NaN stays, and Inf becomes the largest value / s when
    saturating, else Inf in E5M2 and NaN in E4M3; signed zeros keep their sign. HiF8: NaN stays, Inf
    stays or becomes 32768 / s when saturating, there is no negative zero. bf16: nearest even. Of
    FP8, HiF8 and bf16 `axis` has no effect.

    Args:
        x: bfloat16, float16 or float32, of any shape and strides.
        fmt: a name (see `quantexp.formats.table`) or a format.
        axis: the axis that blocks run along.
        block: MX and NVFP4, elements of a block, a power of two.
        scale_rule: MX, how scales follow from amax; None is floor.
        rounding: to nearest, where ties go, or stochastic; None is away for HiF8 and even for all
            others.
        saturate: FP8 and HiF8, whether what is too large becomes the largest finite value.
        scaling: NVFP4, FP8 and HiF8, the scale of the whole tensor; None is none for HiF8 and
            exact for the others.
        amax_target: FP8 and HiF8, where `scaling` brings amax to; None is 15 for HiF8 and for FP8
            the element's largest value. NVFP4's is 6 * 448.
        amax: NVFP4, FP8 and HiF8, 0-dim, the amax to scale by in place of x's largest finite
            magnitude. With `scaling` delayed it must be given (see `history`).
        seed: stochastic rounding, in [0, 2^64), must be given.
        offset: stochastic rounding, in [0, 2^64), None is 0. An element's random number follows
            from seed, offset and its position in x in row-major order: the same for any strides,
            axis, device and number of threads.
        pre_scale: MXFP4 and NVFP4, whether 3/4 x is rounded, under the scale of x: what is returned
            stands for 3/4 x.
        out: where to write, of x's shape and dtype; it may be x itself.
        place: stochastic rounding, where x is a part of a larger tensor: its elements then have the random
            numbers that they have in that one.

    Raises:
        ValueError: for an unknown format, an option the format does not have, a value that is not
            allowed, and a dtype, axis, `out` or place that does not fit.
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
        seed=seed,
        offset=offset,
        pre_scale=pre_scale,
    )
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    check_out(x, out)
    x = x.detach()
    scale = tensor_scale(x, options, amax)
    order = memory_order(x)
    dense = x.permute(order).contiguous()
    target = Target(dense, order, out)
    random = random_numbers(x, options, place)
    random = None if random is None else random.permute(order).contiguous()
    quantise_dense(dense, target.dense, options, order.index(axis) if order else 0, scale, random)
    return target.filled()


def quantise_dense(
    x: Tensor,
    y: Tensor,
    options: Options,
    axis: int,
    scale: Tensor | None,
    random: Tensor | None,
) -> None:
    """Write the contiguous x on the grid to the contiguous y, which may be x itself.

    `scale` is the tensor's (see `tensor_scale`), `random` what stochastic rounding takes (see `philox`), contiguous and
    of x's shape; None where the options ask for none.
    """
    kernel = kernel_for(x, options)
    if kernel is not None:
        kernel.quantise(x, y, options, axis, scale)
    else:
        quantise_by_torch(x, y, options, axis, scale, random)


def quantise_by_torch(
    x: Tensor,
    y: Tensor,
    options: Options,
    axis: int,
    scale: Tensor | None,
    random: Tensor | None,
) -> None:
    """The same by torch alone, on any device: the reference for all kernels."""
    extents = outer_axis_inner(x.shape, axis)
    match options.fmt.family:
        case Family.MX:
            random = None if random is None else random.view(extents)
            quantise_mx(x.view(extents), y.view(extents), options, random)
        case Family.NV:
            random = None if random is None else random.view(extents)
            quantise_nv(x.view(extents), y.view(extents), options, scale, random)
        case Family.HIF8 | Family.FP8:
            random = None if random is None else random.view(-1)
            quantise_flat(x.view(-1), y.view(-1), options, scale, random)
        case Family.BF16:
            y.copy_(x.to(torch.bfloat16))

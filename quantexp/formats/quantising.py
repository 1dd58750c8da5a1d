"""Quantises a tensor: moves its values to the grid of a number format, keeping shape and dtype.

All arithmetic is float32 and exact except for the rounding to the grid. The product of a grid value and its scale is
rounded once more to the tensor's dtype. This changes only values beyond the dtype's largest finite value (they become
Inf): where the grid is finer than the dtype, so was the input. Subnormals are never flushed, unless torch is configured
to (`torch.set_flush_denormal`). This module does not handle gradients (see `quantexp.quant`).
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
from quantexp.formats.per_tensor import quantise_flat
from quantexp.formats.philox import Place, random_numbers
from quantexp.formats.spec import AnySpec, QuantSpec, resolve
from quantexp.formats.tensor_scale import tensor_scale
from quantexp.formats.types import Family, Rounding, ScaleRule, Scaling


@torch.no_grad()
def quantise(
    x: Tensor,
    fmt: AnySpec,
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

    MX and NVFP4: blocks of `block` elements lie along `axis`; the last may be short. NaN or Inf anywhere in a block
    makes the whole block NaN; a zero block keeps its zeros; signed zeros keep their sign. FP8: NaN stays; Inf becomes
    the largest value / s when saturating, else Inf in E5M2 and NaN in E4M3; signed zeros keep their sign. HiF8: NaN
    stays; Inf stays, or becomes 32768 / s when saturating; there is no negative zero. bf16: nearest even. `axis` has no
    effect for FP8, HiF8 and bf16.

    Args:
        x: bfloat16, float16 or float32, of any shape and strides.
        fmt: a name (see `quantexp.formats.table`), a format, or a `QuantSpec`, which has the options from `block` to
            `amax_target`, and `pre_scale`.
        axis: the axis that blocks run along.
        block: MX and NVFP4: elements per block, a power of two; None means 32 (MX) or 16 (NVFP4).
        scale_rule: MX: how amax determines the scale; None means floor.
        rounding: to nearest with a rule for ties, or stochastic; None means away for HiF8 and even for all others.
        saturate: FP8 and HiF8: whether values that are too large become the largest finite value.
        scaling: NVFP4, FP8 and HiF8: the scale of the whole tensor; None means none for HiF8 and exact for the others.
        amax_target: FP8 and HiF8: the amax after `scaling`; None means 15 for HiF8 and the element's largest value for
            FP8. NVFP4's is 6 * 448.
        amax: NVFP4, FP8 and HiF8: 0-dim, replaces x's largest finite magnitude. Required for delayed `scaling` (see
            `history`).
        seed: stochastic rounding: in [0, 2^64), required.
        offset: stochastic rounding: in [0, 2^64), None means 0. An element's random number depends on seed, offset and
            its position in x in row-major order: it is the same for any strides, axis, device and number of threads.
        pre_scale: MXFP4 and NVFP4: whether 3/4 x is rounded, under the scale of x; the result then represents 3/4 x.
        out: where to write the result, of x's shape and dtype; may be x itself.
        place: stochastic rounding: the position of x in a larger tensor; its elements then use their random numbers in
            the larger tensor.

    Raises:
        ValueError: an unknown format, an option the format does not have, a value that is not allowed, or a dtype,
            axis, `out` or place that does not fit.
    """
    spec = resolve(
        fmt,
        block=block,
        scale_rule=scale_rule,
        rounding=rounding,
        saturate=saturate,
        scaling=scaling,
        amax_target=amax_target,
        pre_scale=pre_scale,
    )
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    check_out(x, out)
    x = x.detach()
    scale = tensor_scale(x, spec, amax)
    order = memory_order(x)
    dense = x.permute(order).contiguous()
    target = Target(dense, order, out)
    random = random_numbers(x, spec, seed, offset, place)
    random = None if random is None else random.permute(order).contiguous()
    quantise_dense(dense, target.dense, spec, order.index(axis) if order else 0, scale, random)
    return target.filled()


def quantise_dense(
    x: Tensor,
    y: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None,
    random: Tensor | None,
) -> None:
    """Write the quantised contiguous x to the contiguous y, which may be x itself.

    `scale` is the tensor scale (see `tensor_scale`), `random` is for stochastic rounding (see `philox`), contiguous and
    of x's shape; None if the specification needs none.
    """
    kernel = kernel_for(x, spec)
    if kernel is not None:
        kernel.quantise(x, y, spec, axis, scale)
    else:
        quantise_by_torch(x, y, spec, axis, scale, random)


def quantise_by_torch(
    x: Tensor,
    y: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None,
    random: Tensor | None,
) -> None:
    """The same in torch code, on any device: the reference for all kernels."""
    extents = outer_axis_inner(x.shape, axis)
    match spec.fmt.family:
        case Family.MX:
            random = None if random is None else random.view(extents)
            quantise_mx(x.view(extents), y.view(extents), spec, random)
        case Family.NV:
            random = None if random is None else random.view(extents)
            quantise_nv(x.view(extents), y.view(extents), spec, scale, random)
        case Family.HIF8 | Family.FP8:
            random = None if random is None else random.view(-1)
            quantise_flat(x.view(-1), y.view(-1), spec, scale, random)
        case Family.BF16:
            y.copy_(x.to(torch.bfloat16))

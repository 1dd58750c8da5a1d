"""Quantises a tensor: moves its values to the grid of a number format, keeping shape and dtype.

All arithmetic is float32 and exact except for the rounding to the grid. The product of a grid value and its scale is
rounded once more to the tensor's dtype. This changes only values beyond the dtype's largest finite value (they become
Inf): where the grid is finer than the dtype, so was the input. Subnormals are never flushed, even if torch is
configured to flush them (see `kernels`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.families import quantise_flat, quantise_mx, quantise_nv, tensor_scale
from quantexp.formats.kernels import Kernel, exact, exact_in_pool, kernel_for
from quantexp.formats.layout import (
    Draw,
    Place,
    Target,
    Transform,
    check_out,
    from_tiles,
    in_memory_order,
    inverse,
    memory_order,
    outer_axis_inner,
    positive_axis,
    to_tiles,
)
from quantexp.formats.operators import (
    operator,
    operator_arguments,
    spec_of,
    unsigned,
    with_blocks_of_examples,
    with_derivative_of,
)
from quantexp.formats.spec import AnySpec, QuantSpec, check_draw, resolve
from quantexp.formats.torch_internals import (
    check_amax_tensor,
    check_constant,
    check_derivative,
    check_input,
    constant,
    is_plain,
)
from quantexp.formats.types import Family, Rounding, ScaleRule, Scaling


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
    pre_scale: bool | float = False,
    out: Tensor | None = None,
    place: Place | None = None,
    straight_through: bool = False,
) -> Tensor:
    """The tensor x with its values on the format's grid, in its own shape and dtype.

    MX and NVFP4: blocks of `block` elements lie along `axis`; the last may be short. NaN or Inf anywhere in a block
    makes the whole block NaN; a zero block keeps its zeros; signed zeros keep their sign. FP8: NaN stays; Inf becomes
    the largest value / s when saturating, else Inf in E5M2 and NaN in E4M3; signed zeros keep their sign. HiF8: NaN
    stays; Inf stays, or becomes 32768 / s when saturating; there is no negative zero. bf16: nearest even. `axis` has no
    effect for FP8, HiF8 and bf16.

    Quantising twice equals quantising once, except for NVFP4, stochastic rounding, `pre_scale`, and FP8 and HiF8 whose
    scale follows amax (docs/formats.md). For declared formats, see `quantexp.formats.declared`; blocks of several rows
    take all axes besides `axis`, flattened in order, as rows.

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
        pre_scale: MXFP4 and NVFP4: the part of x that is rounded, under the scale of x: at least 3/4 and below 1, True
            for 3/4. The result then represents that part of x.
        out: where to write the result, of x's shape and dtype; may be x itself.
        place: stochastic rounding: the position of x in a larger tensor; its elements then use their random numbers in
            the larger tensor.
        straight_through: the derivative, forward and backward, is the identity, saturated elements included. Without
            it, a tensor that requires a gradient is an error. It has no effect if no derivative is needed.

    Raises:
        TypeError: x or `out` is not a dense tensor of one of the three dtypes.
        ValueError: an unknown format, an option the format does not have, a value that is not allowed, or an axis,
            `out` or place that does not fit.
        RuntimeError: a derivative is needed of x without `straight_through`, of x with `out`, or of amax.
    """
    options: dict[str, Any] = {
        "block": block,
        "scale_rule": scale_rule,
        "rounding": rounding,
        "saturate": saturate,
        "scaling": scaling,
        "amax_target": amax_target,
        "pre_scale": pre_scale,
    }
    check_input(x)
    axis = positive_axis(axis, x.ndim)
    check_out(x, out)
    check_amax_tensor(amax)
    needs_derivative = check_derivative(x, straight_through, out)
    if is_plain(x, amax, out):
        spec = resolve(fmt, **options)
        if not needs_derivative:
            return _quantised(constant(x), spec, axis, amax, seed, offset, place, out)
        result = x.clone()
        values = result.detach()
        _quantised(values, spec, axis, amax, seed, offset, place, values)
        return result
    parts = (None, None) if place is None else (list(place.whole), list(place.start))
    of_call = *operator_arguments(fmt, axis, amax, seed, offset, **options), *parts
    if needs_derivative or (straight_through and out is None and torch.compiler.is_compiling()):
        return with_derivative_of(x, _operator(x.detach(), *of_call))
    y: Tensor = _operator(x, *of_call)
    return y if out is None else out.copy_(y)


def quantise_transformed(
    x: Tensor,
    spec: QuantSpec,
    transform: Transform,
    *,
    axis: int = -1,
    amax: Tensor | None = None,
    seed: int | None = None,
    offset: int | None = None,
    out: Tensor | None = None,
    place: Place | None = None,
) -> Tensor:
    """`quantise` of the transform of x along `axis`, in x's shape and dtype; by one read where a kernel serves.

    The transform is rounded to the format from float32, never to x's dtype in between. The other arguments are those of
    `quantise`.

    Raises:
        TypeError, ValueError: as for `quantise` and `hadamard`.
        RuntimeError: a derivative of x is needed; this function has none.
    """
    from quantexp.formats.transform import check_transform, hadamard

    check_input(x)
    check_constant(x, "x")
    axis = positive_axis(axis, x.ndim)
    check_transform(transform)
    check_out(x, out)
    check_amax_tensor(amax)
    if is_plain(x, amax, transform.signs, out):
        return _quantised(x.detach(), spec, axis, amax, seed, offset, place, out, transform)
    v = hadamard(x, axis=axis, **vars(transform))
    y = quantise(v, spec, axis=axis, amax=amax, seed=seed, offset=offset, place=place)
    return y.to(x.dtype) if out is None else out.copy_(y)


@exact
def _quantised(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    amax: Tensor | None,
    seed: int | None,
    offset: int | None,
    place: Place | None,
    out: Tensor | None,
    transform: Transform | None = None,
) -> Tensor:
    """`quantise` of a plain tensor, or of its transform in its own dtype."""
    check_draw(spec, seed, offset)
    draw = None
    if spec.rounding is Rounding.STOCHASTIC:
        assert seed is not None, "checked"
        draw = Draw(seed, offset or 0, place)
    kernel = kernel_for(x, spec, transform)
    if kernel is not None:
        return _by_kernel(kernel, x, spec, axis, amax, draw, out, transform)
    if transform is not None:
        from quantexp.formats.transform import hadamard

        v = hadamard(x, axis=axis, **vars(transform))
        v = _quantised(v, spec, axis, amax, seed, offset, place, None)
        return v.to(x.dtype) if out is None else out.copy_(v)
    if spec.fmt.family is Family.PYTHON:
        from quantexp.formats.declared.by_python import quantise_python

        y = quantise_python(x, spec.fmt, axis, seed, offset)
        return y if out is None else out.copy_(y)
    scale = tensor_scale(x, spec, amax)
    random = None
    if draw is not None:
        from quantexp.formats.philox import random_numbers

        random = random_numbers(x, spec, seed, offset, place)
    if spec.fmt.across > 1:
        return _quantised_tiles(x, spec, axis, scale, random, out)
    order = memory_order(x)
    dense = in_memory_order(x, order)
    target = Target(dense, order, out)
    random = None if random is None else random.permute(order).contiguous()
    along = order.index(axis) if order else 0
    quantise_by_torch(dense, target.dense, spec, along, scale, random)
    return target.filled()


def _by_kernel(
    kernel: Kernel,
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    amax: Tensor | None,
    draw: Draw | None,
    out: Tensor | None,
    transform: Transform | None,
) -> Tensor:
    order = memory_order(x)
    dense, along = in_memory_order(x, order), order.index(axis) if order else 0
    target = Target(dense, order, out)
    if transform is not None and spec.is_scaled and amax is None:
        amax = kernel.finite_amax(dense, along, transform)
    scale = tensor_scale(dense, spec, amax)
    if draw is not None and draw.place is not None:
        draw.place.check(x.shape)
    kernel.quantise(dense, target.dense, spec, along, scale, draw, transform)
    return target.filled()


def _quantised_tiles(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None,
    random: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """The same for blocks of several rows."""
    tiles = to_tiles(x, spec.fmt, axis)
    drawn = None if random is None else to_tiles(random, spec.fmt, axis)
    one = (1, tiles.numel(), 1)
    of_tile = replace(spec, block=tiles.shape[-1])
    drawn = None if drawn is None else drawn.view(one)
    quantise_by_torch(tiles.view(one), tiles.view(one), of_tile, 1, scale, drawn)
    y = torch.empty_like(x) if out is None else out
    return y.copy_(from_tiles(tiles, tuple(x.shape), spec.fmt, axis))


def _of_operator(
    x: Tensor,
    spec: str,
    axis: int,
    amax: Tensor | None,
    seed: int | None,
    offset: int | None,
    whole: list[int] | None,
    start: list[int] | None,
) -> Tensor:
    place = None if whole is None or start is None else Place(tuple(whole), tuple(start))
    return _quantised(x, spec_of(spec), axis, amax, unsigned(seed), unsigned(offset), place, None)


def _shape_of_operator(x: Tensor, *_: object) -> Tensor:
    order = memory_order(x)
    dense = torch.empty([x.shape[axis] for axis in order], dtype=x.dtype, device=x.device)
    return dense.permute(inverse(order))


_operator = operator(
    "quantise",
    "(Tensor x, str spec, int axis, Tensor? amax, SymInt? seed, SymInt? offset, SymInt[]? whole, SymInt[]? start)"
    " -> Tensor",
    _of_operator,
    _shape_of_operator,
    with_blocks_of_examples,
)


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
    kernel = kernel_for(x, spec) if random is None else None
    if kernel is not None:
        kernel.quantise(x, y, spec, axis, scale)
    else:
        quantise_by_torch(x, y, spec, axis, scale, random)


@exact_in_pool
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
        case Family.GRID:
            from quantexp.formats.declared.levels import quantise_grid

            random = None if random is None else random.view(extents)
            quantise_grid(x.view(extents), y.view(extents), spec, scale, random)
        case Family.HIF8 | Family.FP8:
            random = None if random is None else random.view(-1)
            quantise_flat(x.view(-1), y.view(-1), spec, scale, random)
        case Family.PYTHON:
            raise AssertionError("quantised before, with its axis as the caller counts it")
        case Family.BF16:
            y.copy_(x.to(torch.bfloat16))

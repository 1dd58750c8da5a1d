"""Quantises one operand according to its specification: the one place where schemes use the number formats."""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats import (
    Place,
    QuantSpec,
    Scales,
    Scaling,
    finite_amax,
    hadamard,
    quantise,
    quantise_both,
    saturated,
    scales_of,
)
from quantexp.quant.sharing import is_one_tensor, shares_read
from quantexp.quant.step_state import current_state


def quantise_operand(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    amax: Tensor | None = None,
    out: Tensor | None = None,
    place: Place | None = None,
) -> Tensor:
    """`x` on the grid of its format, in x's shape and dtype; `x` itself if the slot keeps the working precision.

    With a Hadamard transform, the transform of x lies on the grid, rounded from float32. An empty tensor (an expert
    without tokens) stays empty and enters no amax history.

    Args:
        x: the operand in high precision, never quantised before.
        spec: what its slot declares.
        axis: the dimension of x that the product reduces over: blocks run along it.
        amax: if x is part of a tensor whose scale depends on its amax (`follows_own_amax`), the amax of the whole.
        out: where to write the result, of x's shape and dtype; only for an operand that needs no step state.
        place: the position of x in the tensor it is part of; random numbers depend on it.
    """
    if not spec.quantised or x.numel() == 0:
        return x
    if not spec.needs_step_state:
        return quantise(x, spec, axis=axis, amax=amax, out=out)
    state = current_state()
    v = transformed(x, spec, axis)
    if spec.scaling is Scaling.DELAYED:
        observed = state.amax_for(spec, v)
        amax = observed if amax is None else amax
    return quantise(v, spec, axis=axis, amax=amax, place=place, **state.draw(spec)).to(x.dtype)


def quantise_pair(
    x: Tensor,
    first: QuantSpec,
    second: QuantSpec,
    axes: tuple[int, int],
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`x` quantised for two products, each as `quantise_operand` returns it; None if the second needs its own read.

    It needs none if both are one tensor (a reused forward copy, a format without blocks), or if they differ only in the
    axis of their blocks.

    Args:
        x: as in `quantise_operand`.
        first: the operand of one product.
        second: the operand of the other.
        axes: the dimension that each product reduces over.
        out: where to write each copy, None means fresh memory; a shared copy is written to the second.
        amax: as in `quantise_operand`.
    """
    if not shares_read(first, second):
        return quantise_operand(
            x, first, axes[0], amax, out=out[0]
        ), x if not second.quantised else None
    if is_one_tensor(first, second) or x.numel() == 0:
        copy = quantise_operand(x, first, axes[0], amax, out=out[1])
        return copy, copy
    copies = [torch.empty_like(x) if buffer is None else buffer for buffer in out]
    return quantise_both(x, first, axes=axes, out=(copies[0], copies[1]), amax=amax)


def follows_own_amax(spec: QuantSpec) -> bool:
    """Whether the operand's scale currently depends on the amax of its whole tensor."""
    if spec.scaling is Scaling.DELAYED:
        return current_state().amax(spec) is None
    return spec.is_scaled


def own_amax(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """The amax that determines such a scale, of the Hadamard transform if there is one; 0-dim float32."""
    return finite_amax(transformed(x, spec, axis))


def clipped(
    gradient: Tensor, x: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None = None
) -> Tensor:
    """The gradient of `x`, zero where `x` saturated in the forward product if the slot sets `clip_gradient`.

    `amax` is as in `quantise_operand`.
    """
    if not spec.clip_gradient:
        return gradient
    amax = _delayed_amax(x, spec) if amax is None else amax
    return gradient.masked_fill(saturated(x, spec, axis=axis, amax=amax), 0.0)


def scales(x: Tensor, spec: QuantSpec, axis: int) -> Scales:
    """The scales that `quantise_operand` applies to `x`, in the form of `quantexp.formats.encode`.

    With a Hadamard transform they are those of the transform. Call it after `quantise_operand`, in the same
    micro-batch.
    """
    v = transformed(x, spec, axis)
    return scales_of(v, spec, axis=axis, amax=_delayed_amax(v, spec))


def _delayed_amax(v: Tensor, spec: QuantSpec) -> Tensor | None:
    """The amax that scales v under delayed scaling; None under any other, by which v has its own."""
    if spec.scaling is not Scaling.DELAYED:
        return None
    amax = current_state().amax(spec)
    return finite_amax(v) if amax is None else amax


def transformed(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """`x` after the operand's Hadamard transform along `axis`, in float32; `x` itself if there is none."""
    if not spec.is_transformed:
        return x
    signs = current_state().signs(spec, x.device)
    return hadamard(x, axis=axis, block=spec.hadamard_block, signs=signs, left=spec.left)

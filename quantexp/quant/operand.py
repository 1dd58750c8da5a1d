"""Quantises one operand according to its slot: the one place where schemes use the number formats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.formats import (
    Place,
    Scales,
    Scaling,
    finite_amax,
    hadamard,
    quantise,
    quantise_both,
    saturated,
    scales_of,
)
from quantexp.quant.slots import Operand
from quantexp.quant.step_state import current_state
from quantexp.quant.weight_cache.policy import is_one_tensor, shares_read


def quantise_operand(
    x: Tensor,
    operand: Operand,
    axis: int,
    amax: Tensor | None = None,
    out: Tensor | None = None,
    place: Place | None = None,
) -> Tensor:
    """`x` on the operand's grid, in x's shape and dtype; `x` itself if the slot keeps the working precision.

    With a Hadamard transform, the transform of x lies on the grid, rounded from float32. An empty tensor (an expert
    without tokens) stays empty and enters no amax history.

    Args:
        x: the operand in high precision, never quantised before.
        operand: its declared format and options.
        axis: the dimension of x that the product reduces over: blocks run along it.
        amax: if x is part of a tensor whose scale depends on its amax (`follows_own_amax`), the amax of the whole.
        out: where to write the result, of x's shape and dtype; only for an operand that needs no step state.
        place: the position of x in the tensor it is part of; random numbers depend on it.
    """
    if not operand.quantised or x.numel() == 0:
        return x
    if not operand.needs_step_state:
        return quantise(x, operand.format, axis=axis, amax=amax, out=out, **operand.options)
    state = current_state()
    v = transformed(x, operand, axis)
    options = {**operand.options, **state.draw(operand), "amax": amax, "place": place}
    if operand.scaling is Scaling.DELAYED:
        observed = state.amax_for(operand, v)
        options["amax"] = observed if amax is None else amax
    return quantise(v, operand.format, axis=axis, **options).to(x.dtype)


def quantise_pair(
    x: Tensor,
    first: Operand,
    second: Operand,
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
    options = {**first.options, "amax": amax}
    return quantise_both(x, first.format, axes=axes, out=(copies[0], copies[1]), **options)


def linear_dim(operand: Operand) -> int:
    """The dimension of a linear layer's x or w that blocks run along; the last dimension is the input width."""
    return -1 if operand.axis == "input_width" else 0


def follows_own_amax(operand: Operand) -> bool:
    """Whether the operand's scale currently depends on the amax of its whole tensor."""
    if operand.scaling in (None, Scaling.NONE):
        return False
    return operand.scaling is not Scaling.DELAYED or current_state().amax(operand) is None


def own_amax(x: Tensor, operand: Operand, axis: int) -> Tensor:
    """The amax that determines such a scale, of the Hadamard transform if there is one; 0-dim float32."""
    return finite_amax(transformed(x, operand, axis))


def clipped(
    gradient: Tensor, x: Tensor, operand: Operand, axis: int, amax: Tensor | None = None
) -> Tensor:
    """The gradient of `x`, zero where `x` saturated in the forward product if the slot sets `clip_gradient`.

    `amax` is as in `quantise_operand`.
    """
    if not operand.clip_gradient:
        return gradient
    options = _scale_options(x, operand, "pre_scale")
    if amax is not None:
        options["amax"] = amax
    return gradient.masked_fill(saturated(x, operand.format, axis=axis, **options), 0.0)


def scales(x: Tensor, operand: Operand, axis: int) -> Scales:
    """The scales that `quantise_operand` applies to `x`, in the form of `quantexp.formats.encode`.

    With a Hadamard transform they are those of the transform. Call it after `quantise_operand`, in the same
    micro-batch.
    """
    v = transformed(x, operand, axis)
    return scales_of(v, operand.format, axis=axis, **_scale_options(v, operand))


def _scale_options(v: Tensor, operand: Operand, *more: str) -> dict[str, Any]:
    """The operand's options that determine its scales, and others by name."""
    deciding = ("block", "scale_rule", "scaling", "amax_target", *more)
    options = {name: value for name, value in operand.options.items() if name in deciding}
    if operand.scaling is Scaling.DELAYED:
        amax = current_state().amax(operand)
        options["amax"] = finite_amax(v) if amax is None else amax
    return options


def transformed(x: Tensor, operand: Operand, axis: int) -> Tensor:
    """`x` after the operand's Hadamard transform along `axis`, in float32; `x` itself if there is none."""
    if operand.hadamard is None:
        return x
    assert operand.hadamard_block is not None
    signs = current_state().signs(operand, x.device)
    return hadamard(x, axis=axis, block=operand.hadamard_block, signs=signs, left=operand.left)

"""One operand, held as declared: the one place where a scheme meets the number formats."""

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
from quantexp.quant.step_state import current
from quantexp.quant.weight_cache.policy import is_one_tensor, shares_read


def held(
    x: Tensor,
    operand: Operand,
    axis: int,
    amax: Tensor | None = None,
    out: Tensor | None = None,
    place: Place | None = None,
) -> Tensor:
    """`x` on the operand's grid, in x's shape and dtype; `x` itself where the operand is the working precision.

    With a Hadamard transform it is the transform that lies on the grid, rounded from float32. An empty
    tensor (an expert without tokens) stays empty and enters no history of amax.

    Args:
        x: the operand from high precision, never one that was quantised before.
        operand: its declared format and options.
        axis: the dimension of x that the product reduces over: blocks run along it.
        amax: where x is part of a tensor whose scale follows from its amax (`follows_own_amax`), that of all of it.
        out: where to write it, of x's shape and dtype, of an operand that does not depend on the moment.
        place: where x lies in the tensor that it is a part of: random numbers follow from that.
    """
    if not operand.quantised or x.numel() == 0:
        return x
    if not operand.depends_on_moment:
        return quantise(x, operand.format, axis=axis, amax=amax, out=out, **operand.options)
    moment = current()
    v = transformed(x, operand, axis)
    options = {**operand.options, **moment.draw(operand), "amax": amax, "place": place}
    if operand.scaling is Scaling.DELAYED:
        observed = moment.amax_for(operand, v)
        options["amax"] = observed if amax is None else amax
    return quantise(v, operand.format, axis=axis, **options).to(x.dtype)


def held_by_two(
    x: Tensor,
    first: Operand,
    second: Operand,
    axes: tuple[int, int],
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`x` as two products hold it, each as `held` gives it; None for the second where it takes a read of its own.

    It takes none where both are one tensor (a forward copy used again, a format without blocks), and where they differ
    in the axis of their blocks alone.

    Args:
        x: as `held` takes it.
        first: the operand of one product.
        second: of the other.
        axes: the dimension that each reduces over.
        out: where to write each, None is fresh memory; what is one tensor is written to the second.
        amax: as `held` takes it.
    """
    if not shares_read(first, second):
        return held(x, first, axes[0], amax, out=out[0]), x if not second.quantised else None
    if is_one_tensor(first, second) or x.numel() == 0:
        copy = held(x, first, axes[0], amax, out=out[1])
        return copy, copy
    both = [torch.empty_like(x) if each is None else each for each in out]
    options = {**first.options, "amax": amax}
    return quantise_both(x, first.format, axes=axes, out=(both[0], both[1]), **options)


def linear_dim(operand: Operand) -> int:
    """Where the blocks of a linear layer's x or w run: the last dimension is the input width."""
    return -1 if operand.axis == "input_width" else 0


def follows_own_amax(operand: Operand) -> bool:
    """Whether a scale of the operand follows from the amax of its whole tensor, as it is now."""
    if operand.scaling in (None, Scaling.NONE):
        return False
    return operand.scaling is not Scaling.DELAYED or current().amax(operand) is None


def own_amax(x: Tensor, operand: Operand, axis: int) -> Tensor:
    """The amax that such a scale follows from, after a Hadamard transform that of the transform; 0-dim float32."""
    return finite_amax(transformed(x, operand, axis))


def clipped(
    gradient: Tensor, x: Tensor, operand: Operand, axis: int, amax: Tensor | None = None
) -> Tensor:
    """The gradient of `x`, 0 where `x` saturated in the forward product, if the operand's derivative is clipped so.

    `amax` is as in `held`.
    """
    if not operand.clip_gradient:
        return gradient
    options = _scale_options(x, operand, "pre_scale")
    if amax is not None:
        options["amax"] = amax
    return gradient.masked_fill(saturated(x, operand.format, axis=axis, **options), 0.0)


def scales(x: Tensor, operand: Operand, axis: int) -> Scales:
    """The scales with which `held` brings `x` on the operand's grid, as `quantexp.formats.encode` gives them.

    After a Hadamard transform they are those of the transform. Called after `held`, in the same micro-batch.
    """
    v = transformed(x, operand, axis)
    return scales_of(v, operand.format, axis=axis, **_scale_options(v, operand))


def _scale_options(v: Tensor, operand: Operand, *more: str) -> dict[str, Any]:
    """The operand's options that decide its scales, and more by their names."""
    deciding = ("block", "scale_rule", "scaling", "amax_target", *more)
    options = {name: value for name, value in operand.options.items() if name in deciding}
    if operand.scaling is Scaling.DELAYED:
        amax = current().amax(operand)
        options["amax"] = finite_amax(v) if amax is None else amax
    return options


def transformed(x: Tensor, operand: Operand, axis: int) -> Tensor:
    """`x` after the operand's Hadamard transform along `axis`, in float32; `x` itself where there is none."""
    if operand.hadamard is None:
        return x
    assert operand.hadamard_block is not None
    signs = current().signs(operand, x.device)
    return hadamard(x, axis=axis, block=operand.hadamard_block, signs=signs, left=operand.left)

"""One operand, held as declared: the one place where a scheme meets the number formats."""

from __future__ import annotations

from torch import Tensor

from quantexp.formats import quantise
from quantexp.quant.slots import Operand


def held(x: Tensor, operand: Operand, axis: int) -> Tensor:
    """`x` on the operand's grid, in x's shape and dtype; `x` itself where the operand is the working precision.

    Args:
        x: the operand from high precision, never one that was quantised before.
        operand: its declared format and options.
        axis: the dimension of x that the product reduces over: blocks run along it.
    """
    if not operand.quantised:
        return x
    if operand.scaling is not None:
        return quantise(
            x,
            operand.format,
            axis=axis,
            rounding=operand.rounding,
            scaling=operand.scaling,
            saturate=bool(operand.saturate),
            amax_target=operand.amax_target,
        )
    return quantise(
        x,
        operand.format,
        axis=axis,
        block=operand.block,
        scale_rule=operand.scale_rule,
        rounding=operand.rounding,
    )

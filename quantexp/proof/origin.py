"""What an operand was made from, where its own values do not tell all that was declared.

Most scales follow from the operand itself. Of a tensor's scale that is not so where it is delayed, as it comes from
earlier iterations; where 3/4 or a stochastic rounding may have changed the largest element; and where a transform gave
it more bits than the working precision holds. Then the amax comes from the tensor before. That an operand
went through its Hadamard transform no grid can tell: with the transform undone it has to be near the tensor before.
"Before" is what the product's announcement hands over. A layer that hands over something else than what it quantised
is found, as the two no longer fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats import Rounding, Scaling, finite_amax
from quantexp.quant.multiply import post_scale
from quantexp.quant.operand import transformed
from quantexp.quant.slots import Operand
from quantexp.quant.step_state import current

#: How far an operand may be from the transform of its source, relative to it, in the root mean square. Four bits
#: rounded stochastically stay within 0.3; tensors that have nothing to do with each other are sqrt(2) apart.
FAR = 0.6


def needs_origin(operand: Operand) -> bool:
    """Whether an operand cannot be judged by itself."""
    return operand.hadamard is not None or _hides_scale(operand)


def _hides_scale(operand: Operand) -> bool:
    return operand.scaling not in (None, Scaling.NONE) and (
        operand.scaling is Scaling.DELAYED
        or operand.hadamard is not None
        or operand.rounding is Rounding.STOCHASTIC
        or bool(operand.pre_scale)
    )


def scale_amax(operand: Operand, source: Tensor, axis: int) -> Tensor | None:
    """The amax that decided the scale of the tensor; None where it follows from the operand itself."""
    if not _hides_scale(operand):
        return None
    delayed = current().amax(operand) if operand.scaling is Scaling.DELAYED else None
    return finite_amax(transformed(source, operand, axis)) if delayed is None else delayed


def distance(x: Tensor, operand: Operand, source: Tensor, axis: int) -> float:
    """Root mean square of the operand less the transform of its source, relative to the latter."""
    v = transformed(source, operand, axis).float()
    error = x.float().mul(post_scale(operand)).sub_(v)
    return float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(v))

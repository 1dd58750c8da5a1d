"""Sources of operands: operands before quantisation, where the quantised values alone do not prove the declaration.

Most scales follow from the operand itself. A tensor scale does not if it is delayed, as it comes from earlier
iterations; if pre-scaling by 3/4 or stochastic rounding may have changed the largest element; or if a transform gave
that element more bits than the working precision has. The amax then comes from the source. No grid can show
that an operand went through its Hadamard transform: with the transform undone, the operand must be near its source.
The product's context supplies the source. If a layer supplies another tensor than the one it quantised, the
mismatch is detected, as the two do not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats import Rounding, Scaling, finite_amax
from quantexp.quant.multiply import post_scale
from quantexp.quant.operand import transformed
from quantexp.quant.slots import Operand
from quantexp.quant.step_state import current_state

#: The largest relative distance of an operand from the transform of its source, in the root mean square. Four bits
#: rounded stochastically stay within 0.3; unrelated tensors are sqrt(2) apart.
FAR = 0.6


def needs_origin(operand: Operand) -> bool:
    """Whether an operand cannot be judged without its source."""
    return operand.hadamard is not None or _hides_scale(operand)


def _hides_scale(operand: Operand) -> bool:
    return operand.scaling not in (None, Scaling.NONE) and (
        operand.scaling is Scaling.DELAYED
        or operand.hadamard is not None
        or operand.rounding is Rounding.STOCHASTIC
        or bool(operand.pre_scale)
    )


def scale_amax(operand: Operand, source: Tensor, axis: int) -> Tensor | None:
    """The amax that determined the tensor scale; None if it follows from the operand itself."""
    if not _hides_scale(operand):
        return None
    delayed = current_state().amax(operand) if operand.scaling is Scaling.DELAYED else None
    return finite_amax(transformed(source, operand, axis)) if delayed is None else delayed


def distance(x: Tensor, operand: Operand, source: Tensor, axis: int) -> float:
    """Root mean square of the operand minus the transform of its source, relative to the latter."""
    v = transformed(source, operand, axis).float()
    error = x.float().mul(post_scale(operand)).sub_(v)
    return float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(v))

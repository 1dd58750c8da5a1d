"""Sources of operands: operands before quantisation, where the quantised values alone do not prove the declaration.

Most scales follow from the operand itself. A tensor scale does not if it is delayed, as it comes from earlier
iterations; if pre-scaling by 3/4 or stochastic rounding may have changed the largest element; or if a transform gave
that element more bits than the working precision has. The amax then comes from the source. No grid can show
that an operand went through its Hadamard transform: with the transform undone, the operand must be near its source.
The scales of the family `grid` of declared formats follow from the source alone. In a run with such a format, an
operand in the working precision must be its source, element by element: no count of significands shows an arbitrary
grid. The product's context supplies the source. If a layer supplies another tensor than the one it quantised, the
mismatch is detected, as the two do not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats import Family, QuantSpec, Scaling, finite_amax
from quantexp.formats.declared.origin import stems_from
from quantexp.quant.multiply import post_scale
from quantexp.quant.step_state import current_state
from quantexp.quant.whole_amax import transformed

#: The largest relative distance of an operand from the transform of its source, in the root mean square. Four bits
#: rounded stochastically stay within 0.3; unrelated tensors are sqrt(2) apart.
FAR = 0.6
#: The families whose operands are compared with their sources.
BY_SOURCE = (Family.GRID, Family.PYTHON)


def needs_origin(spec: QuantSpec) -> bool:
    """Whether an operand cannot be judged without its source."""
    return spec.is_transformed or _hides_scale(spec) or spec.fmt.family in BY_SOURCE


def _hides_scale(spec: QuantSpec) -> bool:
    return spec.is_scaled and (spec.needs_step_state or spec.pre_scale)


def scale_amax(spec: QuantSpec, source: Tensor, axis: int) -> Tensor | None:
    """The amax that determined the tensor scale; None if it follows from the operand itself."""
    if not _hides_scale(spec):
        return None
    delayed = current_state().amax(spec) if spec.scaling is Scaling.DELAYED else None
    return finite_amax(transformed(source, spec, axis)) if delayed is None else delayed


def off_grid(
    x: Tensor, spec: QuantSpec, source: Tensor, axis: int, amax: Tensor | None
) -> tuple[int, int]:
    """Of an operand in the family `grid`: elements that are no result of its source, and elements that differ from it.

    `amax` is that of the whole tensor, if its scale depends on it.
    """
    v = transformed(source, spec, axis)
    fits = stems_from(x, v, spec, axis=axis, amax=amax)
    return int((~fits).sum()), int((x != v).sum())


def distance(x: Tensor, spec: QuantSpec, source: Tensor, axis: int) -> float:
    """Root mean square of the operand minus the transform of its source, relative to the latter."""
    v = transformed(source, spec, axis).float()
    error = x.float().mul(post_scale(spec)).sub_(v)
    return float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(v))

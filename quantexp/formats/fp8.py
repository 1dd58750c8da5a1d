"""FP8: an eight-bit float under one scale per tensor (OCP OFP8 v1.0).

    q = e(x s)        y = q / s        in float32, e rounds to the element's grid, subnormals included

A number beyond the largest finite value becomes that value if saturating, else the element's overflow result: Inf in
E5M2, NaN in E4M3, which has no infinity. A number that rounds to the largest value is not beyond it. NaN stays NaN in
place; signed zeros keep their sign.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.bits import MAGNITUDE_MASK, SIGN_MASK, as_bits
from quantexp.formats.layout import Scratch
from quantexp.formats.rounding import round_element
from quantexp.formats.spec import QuantSpec


def scaled_values(
    x_N: Tensor, spec: QuantSpec, scale: Tensor | None, random_N: Tensor | None, scratch: Scratch
) -> Tensor:
    """e(x s) in float32, a scratch buffer."""
    element = spec.fmt.element
    v, sign, magic = scratch.of_shape(x_N.shape)
    v.copy_(x_N)
    if scale is not None:
        v.mul_(scale)
    torch.bitwise_and(as_bits(v), SIGN_MASK, out=as_bits(sign))
    as_bits(v).bitwise_and_(MAGNITUDE_MASK)
    v.clamp_max_(element.max if spec.saturate else 2 * element.max)
    round_element(v, element, spec.rounding, random_N, magic)
    if not spec.saturate:
        v.masked_fill_(v > element.max, math.inf if element.inf_codes else math.nan)
    as_bits(v).bitwise_or_(as_bits(sign))
    return v

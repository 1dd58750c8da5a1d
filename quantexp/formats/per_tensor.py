"""Formats without blocks: each element is quantised independently, under at most one scale per tensor.

y = e(x s) / s        in float32; e is the format's rounding, s the scale

FP8 (OCP OFP8 v1.0): e rounds to the element's grid, subnormals included. A number beyond the largest finite value
becomes that value if saturating, else the element's overflow result: Inf in E5M2, NaN in E4M3, which has no infinity. A
number that rounds to the largest value is not beyond it. NaN stays NaN in place; signed zeros keep their sign. For HiF8
see `hif8`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats import hif8
from quantexp.formats.bits import MAGNITUDE_MASK, SIGN_MASK, as_bits
from quantexp.formats.layout import Scratch, chunk_limit
from quantexp.formats.rounding import round_element
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family


def _fp8_values(
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


#: The families of such formats, each with the function that computes e(x s).
SCALED_VALUES = {Family.HIF8: hif8.scaled_values, Family.FP8: _fp8_values}


def quantise_flat(
    x_N: Tensor,
    y_N: Tensor,
    spec: QuantSpec,
    scale: Tensor | None,
    random_N: Tensor | None = None,
) -> None:
    """Write e(x s) / s to y, which may be x itself; s is a 0-dim float32 tensor, None means 1.

    `random_N` is for stochastic rounding, see `rounding`.
    """
    scaled_values = SCALED_VALUES[spec.fmt.family]
    limit = chunk_limit(x_N.device)
    scratch = Scratch(min(x_N.numel(), limit), x_N.device)
    for start in range(0, x_N.numel(), limit):
        chunk = slice(start, start + limit)
        random = None if random_N is None else random_N[chunk]
        q = scaled_values(x_N[chunk], spec, scale, random, scratch)
        if scale is not None:
            q.div_(scale)
        y_N[chunk].copy_(q)

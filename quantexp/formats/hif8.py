"""HiFloat8: eight bits whose dot code trades mantissa for exponent bits (arXiv 2409.16626, section 3).

With E the exponent of a value, the mantissa has m bits:

    |E| <= 3: 3        4 .. 7: 2        8 .. 15: 1        E in -22 .. -16: 0 (powers of two only)

that is, m = 4 - max(1, floor(log2 |E|)). A value is rounded to the m bits of its own exponent, half away from zero by
default; a carry into the next binade is again a value of the format. |x| < 2^-23 becomes 0, and there is no negative
zero. |x| >= 40960 is beyond the largest finite value 32768: it becomes 32768 or infinite.

There is no block scale. A tensor may be multiplied by one scale s and divided by it afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.bits import BIAS, EXPONENT_MASK, MANTISSA_BITS, SIGN_MASK, as_bits
from quantexp.formats.layout import Scratch
from quantexp.formats.rounding import break_ties, round_at_random, round_to_multiples
from quantexp.formats.spec import QuantSpec
from quantexp.formats.table import HIF8
from quantexp.formats.types import Rounding

_LOWEST_BITS = (HIF8.emin + BIAS) << MANTISSA_BITS
_HIGHEST_BITS = (HIF8.emax + BIAS) << MANTISSA_BITS


def scaled_values(
    x_N: Tensor, spec: QuantSpec, scale: Tensor | None, random_N: Tensor | None, scratch: Scratch
) -> Tensor:
    """hif8(x s) in float32, a scratch buffer; NaN stays NaN."""
    v, magic, exponent = scratch.of_shape(x_N.shape)
    v.copy_(x_N)
    if scale is not None:
        v.mul_(scale)
    bound = HIF8.max if spec.saturate else 2 * HIF8.max
    v.clamp_(-bound, bound)
    if spec.rounding is Rounding.STOCHASTIC:
        _round_at_random(v, magic, exponent, random_N)
    else:
        break_ties(v, spec.rounding)
        spacing_to(magic, v, exponent, factor=1.5 * 2.0**MANTISSA_BITS)
        round_to_multiples(v, magic)
    if not spec.saturate:
        v.masked_fill_(v > HIF8.max, math.inf).masked_fill_(v < -HIF8.max, -math.inf)
    return v


def _round_at_random(v: Tensor, step: Tensor, scratch: Tensor, random: Tensor | None) -> None:
    assert random is not None
    spacing_to(step, v, scratch)
    sign = as_bits(v).bitwise_and(SIGN_MASK)
    round_at_random(v.abs_(), step, random)
    as_bits(v).bitwise_or_(sign)
    v.add_(0.0)  # turns -0 into +0


def spacing_to(out: Tensor, v: Tensor, scratch: Tensor, *, factor: float = 1.0) -> None:
    """Write factor * 2^(E - m) to `out`: 2^(E - m) is the grid's spacing in the binade of each v.

    All three are float32 and of one shape. E is -22 below the smallest value, and 15 above the largest binade and for
    NaN and Inf.
    """
    bits = as_bits(out)
    torch.bitwise_and(as_bits(v), EXPONENT_MASK, out=bits)
    bits.clamp_(_LOWEST_BITS, _HIGHEST_BITS)
    # The exponent field, read as a number, is (E + 127) 2^23, exactly. Minus the bias it is E 2^23, and its own
    # exponent is 23 + floor(log2 |E|).
    scratch.copy_(bits)
    scratch.sub_(BIAS << MANTISSA_BITS)
    as_bits(scratch).bitwise_and_(EXPONENT_MASK)
    scratch.clamp_min_(2.0 ** (MANTISSA_BITS + 1))
    out.mul_(scratch).mul_(factor * 2.0 ** -(MANTISSA_BITS + 4))

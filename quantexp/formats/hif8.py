"""HiFloat8: eight bits whose dot code trades mantissa for exponent (arXiv 2409.16626, section 3).

With E the exponent of a value, the mantissa has m bits:

    |E| <= 3: 3        4 .. 7: 2        8 .. 15: 1        E in -22 .. -16: 0 (powers of two only)

which is m = 4 - max(1, floor(log2 |E|)). A value is rounded on the m of its own exponent, by
default half away from zero; a carry into the next binade lands on a value of the format.
|x| < 2^-23 becomes 0, and there is no negative zero. |x| >= 40960 is beyond the largest finite
value 32768: it becomes that, or infinite.

There is no block scale. A tensor may be multiplied with one scale s and divided by it afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.bits import BIAS, EXPONENT_MASK, MANTISSA_BITS, as_bits
from quantexp.formats.layout import Scratch, chunk_limit
from quantexp.formats.options import Options
from quantexp.formats.rounding import break_ties, round_to_multiples
from quantexp.formats.table import HIF8

_LOWEST_BITS = (HIF8.emin + BIAS) << MANTISSA_BITS
_HIGHEST_BITS = (HIF8.emax + BIAS) << MANTISSA_BITS


def quantise_hif8(x_N: Tensor, y_N: Tensor, options: Options, scale: Tensor | None) -> None:
    """Write hif8(x s) / s to y, which may be x itself; s is a 0-dim float32 tensor, None for 1."""
    limit = chunk_limit(x_N.device)
    scratch = Scratch(min(x_N.numel(), limit), x_N.device)
    for start in range(0, x_N.numel(), limit):
        chunk = slice(start, start + limit)
        q = scaled_values(x_N[chunk], options, scale, scratch)
        if scale is not None:
            q.div_(scale)
        y_N[chunk].copy_(q)


def scaled_values(x_N: Tensor, options: Options, scale: Tensor | None, scratch: Scratch) -> Tensor:
    """hif8(x s) in float32, a temporary of the scratch; NaN stays NaN."""
    v, magic, exponent = scratch.of_shape(x_N.shape)
    v.copy_(x_N)
    if scale is not None:
        v.mul_(scale)
    bound = HIF8.max if options.saturate else 2 * HIF8.max
    v.clamp_(-bound, bound)
    break_ties(v, options.rounding)
    spacing_to(magic, v, exponent, factor=1.5 * 2.0**MANTISSA_BITS)
    round_to_multiples(v, magic)
    if not options.saturate:
        v.masked_fill_(v > HIF8.max, math.inf).masked_fill_(v < -HIF8.max, -math.inf)
    return v


def spacing_to(out: Tensor, v: Tensor, scratch: Tensor, *, factor: float = 1.0) -> None:
    """Write factor * 2^(E - m) to `out`: 2^(E - m) is the grid's spacing in the binade of each v.

    All three are float32 and of one shape. Below the smallest value E is -22, above the largest
    binade, and for NaN and Inf, it is 15.
    """
    bits = as_bits(out)
    torch.bitwise_and(as_bits(v), EXPONENT_MASK, out=bits)
    bits.clamp_(_LOWEST_BITS, _HIGHEST_BITS)
    # The field read as a number is (E + 127) 2^23, exactly. Less the bias it is E 2^23, and its own
    # exponent 23 + floor(log2 |E|).
    scratch.copy_(bits)
    scratch.sub_(BIAS << MANTISSA_BITS)
    as_bits(scratch).bitwise_and_(EXPONENT_MASK)
    scratch.clamp_min_(2.0 ** (MANTISSA_BITS + 1))
    out.mul_(scratch).mul_(factor * 2.0 ** -(MANTISSA_BITS + 4))

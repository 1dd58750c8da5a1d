"""HiFloat8 on a GPU, in Triton: `rounding.hif8_values` under at most one scale, bit for bit, in one pass.

    v = clamp(x s)        C = 1.5 2^23 max(binade(v), 2^-22) max(2^floor(log2 |E|), 2) / 16        y = ((v + C) - C) / s

The scale is read on the device. Dividing by a power of two is multiplying by its inverse, exactly; any other scale is
divided by, rounded to nearest. floor(log2 |E|) is the exponent of E, which the adder converts to float (2^23 + n has n
in its last bits). For ties away from zero, the last bit of v is set before rounding. If x is bfloat16 and s a power of
two, s (1 + 2^-23) replaces s instead, which moves v up by one or two units in its last place, far below the next tie,
and leaves zero unchanged. NaN stays; there is no negative zero, as (v + C) - C has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_words import (
    EXPONENT,
    as_bits,
    as_float,
    first_bits,
    paired,
    second_bits,
    single,
    single_bits,
)

MAX = tl.constexpr(32768.0)
LOWEST_BITS = tl.constexpr((127 - 22) << 23)
#: 2^23, whose last bits hold an integer.
TWO_TO_23_BITS = tl.constexpr(0x4B000000)
#: 2^23 + 127 * 2^7: the bias as it appears in the upper half of a float's bits.
BIAS = tl.constexpr(8388608.0 + 127 * 128)
ABOVE_ONE = tl.constexpr(1 + 2.0**-23)
TWO_TO_MINUS_127 = tl.constexpr(1 << 22)
INVERSES = tl.constexpr(254 << 23)


@triton.jit
def on_grid(bits, factor, SATURATES: tl.constexpr, SETS_LAST_BIT: tl.constexpr):
    """hif8 of x * factor, float32, from the bits of x."""
    BOUND: tl.constexpr = MAX if SATURATES else 2 * MAX
    v = as_float(bits) * factor
    v = tl.minimum(v, BOUND, propagate_nan=tl.PropagateNan.ALL)
    v = tl.maximum(v, -BOUND, propagate_nan=tl.PropagateNan.ALL)
    if SETS_LAST_BIT:
        v = as_float(as_bits(v) | 1)
    binade = tl.maximum(as_bits(v) & EXPONENT, LOWEST_BITS)
    exponent = as_float((binade >> 16) | TWO_TO_23_BITS) - BIAS
    tier = tl.maximum(as_bits(exponent) & EXPONENT, (127 + 8) << 23)
    magic = as_float(binade) * (1.5 * 2.0 ** (23 - 4 - 7)) * as_float(tier)
    q = (v + magic) - magic
    if not SATURATES:
        q = tl.where(q > MAX, float("inf"), tl.where(q < -MAX, float("-inf"), q))
    return q


@triton.jit
def under_scale(bits, s, IS_POWER: tl.constexpr, IS_AWAY: tl.constexpr, SATURATES: tl.constexpr):
    """hif8 of x s, divided by s, float32, from the bits of x."""
    q = on_grid(bits, s, SATURATES, IS_AWAY)
    if IS_POWER:
        return q * as_float(tl.maximum(-as_bits(s) + INVERSES, TWO_TO_MINUS_127))
    else:
        return tl.div_rn(q, s)


@triton.jit
def hif8_flat(
    x_N,
    y_N,
    scale,
    N,
    SIZE: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_POWER: tl.constexpr,
    IS_AWAY: tl.constexpr,
    SATURATES: tl.constexpr,
):
    """N words (IS_PAIRS) or elements; y may be x. IS_POWER: the scale is a power of two, or there is none."""
    s = tl.load(scale) if HAS_SCALE else tl.full((), 1.0, tl.float32)
    start = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE)
    inside = start + at < N
    raw = tl.load(x_N + start + at, mask=inside, other=0)
    if IS_PAIRS:
        factor = s * ABOVE_ONE if IS_AWAY else s
        inverse = as_float(tl.maximum(-as_bits(s) + INVERSES, TWO_TO_MINUS_127))
        first = on_grid(first_bits(raw), factor, SATURATES, False) * inverse
        second = on_grid(second_bits(raw), factor, SATURATES, False) * inverse
        y = paired(as_bits(first), as_bits(second))
    else:
        y = under_scale(single_bits(raw), s, IS_POWER, IS_AWAY, SATURATES)
        y = single(as_bits(y), raw.dtype, IS_POWER)
    tl.store(y_N + start + at, y, mask=inside)

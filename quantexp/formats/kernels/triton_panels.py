"""Blocks of any shape, scale and element on a GPU, in Triton: what `cpu.c` does in panels, bit for bit, in one pass.

A program reads a tile of whole blocks, transforms it if there is a transform, and rounds it under the scales of its
blocks; for a second result once more under other blocks. `G`, a `Grid` of `gpu`, is the number format, known to the
compiler. Rounding to nearest adds a number whose spacing is that of the grid, and takes it off; at random, the integer
of an element is drawn from its position (see `quantexp.formats.philox`). Divisions are rounded once (`div_rn`), as
torch's are. A power of two is built from its bits, so multiplying by it is exact.

Tiles are [TALL, WIDE] parts of [outer, rows, columns]. In arithmetic they are [TALL / m, m, WIDE / n, n], m x n being a
block, and scales [TALL / m, 1, WIDE / n, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_amax import finite_magnitude
from quantexp.formats.kernels.triton_tiles import random_numbers, tile_of, transformed
from quantexp.formats.kernels.triton_words import (
    EXPONENT,
    MAGNITUDE,
    NAN,
    SIGN,
    as_bits,
    as_float,
    single,
    single_bits,
)

ONE = tl.constexpr(127 << 23)
TWO_TO_MINUS_127 = tl.constexpr(1 << 22)
TWO_TO_MINUS_126 = tl.constexpr(1 << 23)
INVERSES = tl.constexpr(254 << 23)
#: `Grid.kind`: powers of two, small floats, bfloat16, float32, one scale for all elements. `Grid.rule`.
POWER, SMALL, WIDE_FLOAT, SINGLE, CONSTANT = (tl.constexpr(number) for number in range(5))
NEAREST, FLOOR, CEIL = (tl.constexpr(number) for number in range(3))
HIF8 = tl.constexpr(2)


@triton.jit
def binades(v, EMIN: tl.constexpr):
    """The bits of the largest power of two up to v >= 0, at least of 2^EMIN."""
    return tl.maximum(as_bits(v) & EXPONENT, (EMIN + 127) << 23)


@triton.jit
def on_steps(v, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr):
    """v >= 0 rounded to so many mantissa bits, to nearest even."""
    magic = as_float(binades(v, EMIN) + ((23 - MANTISSA_BITS) << 23))
    return (v + magic) - magic


@triton.jit
def small_scales(ratio, G: tl.constexpr):
    """Positive ratios on the grid of a small float."""
    v = as_float(tl.maximum(tl.minimum(as_bits(ratio), G.scale_max_bits), G.scale_min_bits))
    b = on_steps(v, G.scale_mantissa_bits, G.scale_emin)
    if G.rule == NEAREST:
        return b
    else:
        step = as_float(binades(v, G.scale_emin) - (G.scale_mantissa_bits << 23))
        if G.rule == FLOOR:
            return tl.where(b > v, b - step, b)
        else:
            b = tl.where(b < v, b + step, b)
            return as_float(tl.minimum(as_bits(b), G.scale_max_bits))


@triton.jit
def wide_scales(ratio, G: tl.constexpr):
    """Ratios >= 0 as normal numbers of bfloat16."""
    bits = tl.minimum(as_bits(ratio), EXPONENT)
    if G.rule == NEAREST:
        bits += 0x7FFF + ((bits >> 16) & 1)
    elif G.rule == CEIL:
        bits += 0xFFFF
    bits = bits & -65536
    return as_float(tl.maximum(tl.minimum(bits, G.scale_max_bits), G.scale_min_bits))


@triton.jit
def factors(amax, t, HAS_SCALE: tl.constexpr, G: tl.constexpr):
    """What elements are multiplied by before rounding, or divided, and multiplied by after: float32, from bits."""
    a, is_nan = as_float(amax), amax >= EXPONENT
    if G.kind == POWER:
        ratio = as_bits(tl.div_rn(a, t)) if HAS_SCALE else amax
        field = tl.maximum(((ratio + G.offset) & EXPONENT) - (G.emax << 23), 0)
        is_nan = is_nan | (ratio >= EXPONENT) | (field >= EXPONENT)
        inverse = as_float(tl.maximum(-field + INVERSES, TWO_TO_MINUS_127))
        b = as_float(tl.maximum(field, TWO_TO_MINUS_127))
    else:
        if HAS_SCALE and G.tensor_first:
            a = tl.div_rn(a, t)
        a = tl.div_rn(a, tl.full((), G.max, tl.float32))
        if HAS_SCALE and not G.tensor_first:
            a = tl.div_rn(a, t)
        if G.kind == SMALL:
            b = small_scales(a, G)
        elif G.kind == WIDE_FLOAT:
            b = wide_scales(a, G)
        else:
            b = as_float(tl.where(a == 0.0, ONE, tl.maximum(as_bits(a), TWO_TO_MINUS_126)))
        inverse = b
    if HAS_SCALE:
        b = b * t
    return inverse, as_float(tl.where(is_nan, NAN, as_bits(b)))


@triton.jit
def random_steps(v, G: tl.constexpr):
    """The bits of the spacing of the grid around v >= 0."""
    if G.family == HIF8:
        field = tl.minimum(binades(v, G.emin) >> 23, G.emax + 127)
        e = tl.abs(field - 127)
        lost = (e > 3).to(tl.int32) + (e > 7).to(tl.int32) + (e > 15).to(tl.int32)
        return (field - 3 + lost) << 23
    else:
        return binades(v, G.emin) - (G.mantissa_bits << 23)


@triton.jit
def at_random(v, number, G: tl.constexpr):
    """v >= 0, rounded up if its part beyond the multiple of the spacing below, in 2^-24, exceeds its number."""
    step = random_steps(v, G)
    multiples = v * as_float(-step + INVERSES)
    below = tl.floor(multiples)
    is_up = (multiples - below) * 16777216.0 >= number + 1.0
    return tl.where(is_up, below + 1.0, below) * as_float(step)


@triton.jit
def to_nearest(v, G: tl.constexpr):
    """v >= 0 on the element's grid, continued beyond its largest value."""
    return on_steps(as_float(as_bits(v) | G.away), G.mantissa_bits, G.emin)


@triton.jit
def on_element(x, inverse, factor, number, HAS_SCALE: tl.constexpr, G: tl.constexpr):
    """The quantised x, float32."""
    bits = as_bits(x)
    v = as_float(bits & MAGNITUDE)
    if G.family:
        if HAS_SCALE:
            v = v * factor
    elif G.kind == POWER and not HAS_SCALE:
        v = v * inverse
    elif G.kind != CONSTANT or HAS_SCALE:
        v = tl.div_rn(v, factor)
    if G.pre_scale != 1.0:
        v = v * G.pre_scale
    most = 2.0 * G.max if G.beyond else G.max
    if G.lowest != G.max:
        most = tl.where(bits < 0, G.lowest, G.max)
    v = tl.minimum(v, most, propagate_nan=tl.PropagateNan.ALL)
    v = at_random(v, number, G) if G.is_random else to_nearest(v, G)
    q = as_float(as_bits(v) | (bits & SIGN))
    if not G.has_negative_zero:
        q = q + 0.0
    if G.beyond:
        q = tl.where(v > G.max, as_float((bits & SIGN) | G.beyond), q)
    if not (HAS_SCALE or G.kind != CONSTANT):
        return q
    else:
        return tl.div_rn(q, factor) if G.family else q * factor


@triton.jit
def quantised(
    x,
    numbers,
    t,
    dtype: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    G: tl.constexpr,
):
    """The stored form of a tile in blocks of M x N."""
    x = tl.reshape(x, (TALL // M, M, WIDE // N, N))
    number = tl.reshape(numbers, (TALL // M, M, WIDE // N, N)) if G.is_random else 0.0
    if G.kind == CONSTANT:
        inverse, factor = t, t
    else:
        amax = tl.max(as_bits(x) & MAGNITUDE, 3, keep_dims=True)
        inverse, factor = factors(tl.max(amax, 1, keep_dims=True), t, HAS_SCALE, G)
    y = on_element(x, inverse, factor, number, HAS_SCALE, G)
    return single(as_bits(tl.reshape(y, (TALL, WIDE))), dtype, False)


@triton.jit(do_not_specialize=["seed_0", "seed_1", "offset_0", "offset_1"])
def panels(
    x,
    y,
    second,
    scale,
    signs,
    starts,
    rows,
    columns,
    middle,
    length,
    seed_0,
    seed_1,
    offset_0,
    offset_1,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HADAMARD: tl.constexpr,
    IS_DOWN: tl.constexpr,
    IS_LEFT: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    IN_FOURS: tl.constexpr,
    G: tl.constexpr,
):
    """A tile in blocks of M x N to y, which may be x, and in rows of M elements to `second` if there is one."""
    r, c, at = tile_of(rows, columns, middle, TALL, WIDE)
    inside = (r < rows) & (c < columns)
    raw = tl.load(x + at, mask=inside, other=0)
    v = as_float(single_bits(raw))
    if HADAMARD:
        place, extent = (r, rows) if IS_DOWN else (c, columns)
        v = transformed(v, place, extent, signs, TALL, WIDE, HADAMARD, IS_DOWN, IS_LEFT, HAS_SIGNS)
    numbers = v
    if G.is_random:
        at_known = tl.where(inside, at, 0) if HAS_STARTS else at
        numbers = random_numbers(
            at_known,
            starts,
            length,
            seed_0,
            seed_1,
            offset_0,
            offset_1,
            TALL,
            WIDE,
            HAS_STARTS,
            IN_FOURS,
        )
    t = tl.load(scale) if HAS_SCALE else tl.full((), 1.0, tl.float32)
    result = quantised(v, numbers, t, raw.dtype, TALL, WIDE, M, N, HAS_SCALE, G)
    tl.store(y + at, result, mask=inside)
    if HAS_SECOND:
        result = quantised(v, numbers, t, raw.dtype, TALL, WIDE, 1, M, HAS_SCALE, G)
        tl.store(second + at, result, mask=inside)


@triton.jit
def amax_panels(
    x,
    amax_bits,
    signs,
    rows,
    columns,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    HADAMARD: tl.constexpr,
    IS_DOWN: tl.constexpr,
    IS_LEFT: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
):
    """Raise the int32 at `amax_bits`, initially 0, to the bits of the finite amax of a transform."""
    r, c, at = tile_of(rows, columns, 1, TALL, WIDE)
    raw = tl.load(x + at, mask=(r < rows) & (c < columns), other=0)
    v = as_float(single_bits(raw))
    place, extent = (r, rows) if IS_DOWN else (c, columns)
    v = transformed(v, place, extent, signs, TALL, WIDE, HADAMARD, IS_DOWN, IS_LEFT, HAS_SIGNS)
    tl.atomic_max(amax_bits, tl.max(tl.max(finite_magnitude(as_bits(v)), 1), 0), sem="relaxed")

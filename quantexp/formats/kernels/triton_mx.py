"""MX on a GPU, in Triton: `quantexp.formats.families.quantise_mx`, bit for bit, in one pass over the memory.

    field = max((bits(amax) + OFFSET) & exponent - emax 2^23, 0)            one integer add for each scale rule
    a = |x| 2^-s        C = 1.5 max(binade(a), 2^emin) 2^(23 - m)        q = min((a + C) - C, max)        y = sign q 2^s

Powers of two are built from bits, and only the first and the last product can round: a 2^-s below float32's normal
range becomes 0 in q either way, and q 2^s is exact unless it is infinite. (a + C) - C must be two roundings: kernels
are launched without contraction, and a test searches the compiled code for contracted, approximate or
subnormal-flushing instructions. q has at most four significant bits and y is a multiple of what x is a multiple of, so
bfloat16 represents every y of a bfloat16 x exactly.

`mx_flat` processes consecutive blocks; `mx_tile` processes blocks along rows, columns or both of one tile, which
is read once. Each thread reads and writes 16 contiguous bytes where the extents allow it. Blocks have 32 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_words import (
    EXPONENT,
    MAGNITUDE,
    NAN,
    SIGN,
    as_bits,
    as_float,
    first_bits,
    paired,
    second_bits,
    single,
    single_bits,
)

BLOCK = tl.constexpr(32)
PAIR_MAGNITUDES = tl.constexpr(0x7FFF7FFF)
PAIR_SIGNS = tl.constexpr(-(1 << 31) | 0x8000)
TWO_TO_MINUS_127 = tl.constexpr(1 << 22)
INVERSES = tl.constexpr(254 << 23)


@triton.jit
def block_scales(amax_bits, OFFSET: tl.constexpr, EMAX: tl.constexpr):
    """2^-s and 2^s of blocks, float32, from the bits of amax; the second is NaN for a block with NaN or Inf."""
    field = tl.maximum(((amax_bits + OFFSET) & EXPONENT) - (EMAX << 23), 0)
    inverse = tl.maximum(-field + INVERSES, TWO_TO_MINUS_127)
    scale = tl.where(amax_bits >= EXPONENT, NAN, tl.maximum(field, TWO_TO_MINUS_127))
    return as_float(inverse), as_float(scale)


@triton.jit
def on_grid(
    magnitude,
    inverse,
    scale,
    EMIN: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    IS_AWAY: tl.constexpr,
):
    """The bits of |y| from those of |x|; MAX is None if nothing saturates."""
    a = as_float(magnitude) * inverse
    if IS_AWAY:
        a = as_float(as_bits(a) | 1)
    binade = tl.maximum(as_bits(a) & EXPONENT, (EMIN + 127) << 23)
    magic = as_float(binade) * (1.5 * 2.0 ** (23 - MANTISSA_BITS))
    q = (a + magic) - magic
    if MAX is not None:
        q = tl.minimum(q, MAX)
    return as_bits(q * scale)


@triton.jit
def quantised(
    raw,
    AXIS: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    IS_AWAY: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """The stored form of a tile with blocks along AXIS, the last (IS_LAST) or another."""
    if IS_PAIRS:
        magnitudes = raw & PAIR_MAGNITUDES
        first, second = first_bits(magnitudes), second_bits(magnitudes)
        if IS_LAST:
            amax = tl.max(tl.maximum(first, second), AXIS, keep_dims=True)
            inverse, scale = block_scales(amax, OFFSET, EMAX)
            first = on_grid(first, inverse, scale, EMIN, MANTISSA_BITS, MAX, IS_AWAY)
        else:
            inverse, scale = block_scales(tl.max(first, AXIS, keep_dims=True), OFFSET, EMAX)
            first = on_grid(first, inverse, scale, EMIN, MANTISSA_BITS, MAX, IS_AWAY)
            inverse, scale = block_scales(tl.max(second, AXIS, keep_dims=True), OFFSET, EMAX)
        second = on_grid(second, inverse, scale, EMIN, MANTISSA_BITS, MAX, IS_AWAY)
        return paired(first, second) | (raw & PAIR_SIGNS)
    else:
        bits = single_bits(raw)
        magnitude = bits & MAGNITUDE
        inverse, scale = block_scales(tl.max(magnitude, AXIS, keep_dims=True), OFFSET, EMAX)
        y = on_grid(magnitude, inverse, scale, EMIN, MANTISSA_BITS, MAX, IS_AWAY) | (bits & SIGN)
        return single(y, raw.dtype, True)


@triton.jit
def mx_flat(
    x_BK,
    y_BK,
    num_blocks,
    BLOCKS: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    IS_AWAY: tl.constexpr,
):
    """Whole consecutive blocks, BLOCKS per program; y may be x."""
    EXTENT: tl.constexpr = BLOCK // 2 if IS_PAIRS else BLOCK
    first = tl.program_id(0) * BLOCKS
    b = tl.arange(0, BLOCKS)[:, None]
    at = b * EXTENT + tl.arange(0, EXTENT)[None, :]
    inside = first + b < num_blocks
    start = first.to(tl.int64) * EXTENT
    raw = tl.load(x_BK + start + at, mask=inside, other=0)
    y = quantised(raw, 1, IS_PAIRS, OFFSET, EMAX, EMIN, MANTISSA_BITS, MAX, IS_AWAY, True)
    tl.store(y_BK + start + at, y, mask=inside)


@triton.jit
def mx_tile(
    x_ONML,
    rows_ONML,
    columns_ONML,
    N,
    M,
    L,
    GROUPS: tl.constexpr,
    HAS_MIDDLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    IS_AWAY: tl.constexpr,
):
    """A tile of 32 along N and GROUPS blocks along L: with blocks along L to `rows`, along N to `columns`.

    Programs enumerate tiles along L (times M, if HAS_MIDDLE), blocks along N, and O. L counts words. The last block may
    be short in both directions. `rows` or `columns` may be x; an output that is not requested is not written.
    """
    EXTENT: tl.constexpr = BLOCK // 2 if IS_PAIRS else BLOCK
    WIDTH: tl.constexpr = GROUPS * EXTENT
    tiles = tl.cdiv(L, WIDTH)
    if HAS_MIDDLE:
        m = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
    else:
        m = 0
        tile = tl.program_id(0) + 0 * tiles  # 64 bits if L is
    n = tl.arange(0, BLOCK)[:, None]
    inner = tile * WIDTH + tl.arange(0, WIDTH)[None, :]
    block = tl.program_id(1) * BLOCK
    inside = (block + n < N) & (inner < L)
    first = (tl.program_id(2).to(tl.int64) * N + block) * M + m
    at = (first + n.to(tl.int64) * M) * L + inner
    raw = tl.load(x_ONML + at, mask=inside, other=0)
    if HAS_ROWS:
        blocks = tl.reshape(raw, (BLOCK, GROUPS, EXTENT))
        y = quantised(blocks, 2, IS_PAIRS, OFFSET, EMAX, EMIN, MANTISSA_BITS, MAX, IS_AWAY, True)
        tl.store(rows_ONML + at, tl.reshape(y, (BLOCK, WIDTH)), mask=inside)
    if HAS_COLUMNS:
        y = quantised(raw, 0, IS_PAIRS, OFFSET, EMAX, EMIN, MANTISSA_BITS, MAX, IS_AWAY, False)
        tl.store(columns_ONML + at, y, mask=inside)

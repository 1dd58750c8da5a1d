"""Tiles of `triton_panels` before they are rounded: where their elements lie, transforms, random numbers.

The transform is that of `quantexp.formats.transform`, with its sums in the same order; the numbers are those of
`quantexp.formats.philox`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece_sizes(place, extent, BLOCK: tl.constexpr, IS_LEFT: tl.constexpr):
    """Of the elements of an axis: the size of the transform that each is part of, and its factor.

    A short last block is divided into powers of two, the largest first: the binary digits of its extent.
    """
    i = place % BLOCK
    left = tl.minimum(extent - (place - i), BLOCK)
    size = i * 0 + 1
    factor = size.to(tl.float32)
    for k in tl.static_range(1, 15):
        if (1 << k) <= BLOCK:
            start = (left >> (k + 1)) << (k + 1)
            is_here = ((left >> k) & 1 == 1) & (i >= start) & (i < start + (1 << k))
            size = tl.where(is_here, 1 << k, size)
            factor = tl.where(is_here, 0.5 ** ((k + 1) // 2 if IS_LEFT else k // 2), factor)
    return size, factor


@triton.jit
def butterflies(v, TALL: tl.constexpr, WIDE: tl.constexpr, APART: tl.constexpr):
    """Sums and differences of the elements that lie so many apart in memory order."""
    pairs = tl.reshape(v, (TALL * WIDE // (2 * APART), 2, APART))
    a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (TALL, WIDE))


@triton.jit
def transformed(
    v,
    place,
    extent,
    signs,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DOWN: tl.constexpr,
    IS_LEFT: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
):
    """The Hadamard transform of a tile down its rows or along its columns, whose places on the axis are `place`."""
    if HAS_SIGNS:
        v = v * tl.load(signs + place % BLOCK)
    size, factor = piece_sizes(place, extent, BLOCK, IS_LEFT)
    for k in tl.static_range(14):
        if (2 << k) <= BLOCK:
            sums = butterflies(v, TALL, WIDE, (1 << k) * WIDE if IS_DOWN else 1 << k)
            v = tl.where(size > (1 << k), sums, v)
    return v * factor


@triton.jit
def words_at(counter, seed_0, seed_1, offset_0, offset_1):
    """The four words of Philox4x32-10 for 64-bit counters."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    above_0 = (low * 0).to(tl.uint32) + offset_0.to(tl.uint32, bitcast=True)
    above_1 = (low * 0).to(tl.uint32) + offset_1.to(tl.uint32, bitcast=True)
    key_0, key_1 = seed_0.to(tl.uint32, bitcast=True), seed_1.to(tl.uint32, bitcast=True)
    return tl.philox_impl(low, high, above_0, above_1, key_0, key_1)


@triton.jit
def random_numbers(
    at,
    starts,
    length,
    seed_0,
    seed_1,
    offset_0,
    offset_1,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    IN_FOURS: tl.constexpr,
):
    """Integers of 24 bits as float32. IN_FOURS: each row of the tile begins at a multiple of four, without `starts`."""
    if IN_FOURS:
        fours = tl.reshape(at, (TALL, WIDE // 4, 4))
        counter = tl.min(fours, 2) >> 2
        w0, w1, w2, w3 = words_at(counter, seed_0, seed_1, offset_0, offset_1)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TALL, WIDE))
    else:
        if HAS_STARTS:
            row = at // length
            at = tl.load(starts + row) + (at - row * length)
        w0, w1, w2, w3 = words_at(at >> 2, seed_0, seed_1, offset_0, offset_1)
        place = at & 3
        word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return (word >> 8).to(tl.int32).to(tl.float32)


@triton.jit
def tile_of(rows, columns, middle, TALL: tl.constexpr, WIDE: tl.constexpr):
    """A program's rows and columns, its first element, and the first column; `columns` are those of one of `middle`."""
    across = tl.cdiv(columns, WIDE)
    down = tl.cdiv(rows, TALL)
    program = tl.program_id(0).to(tl.int64)
    c = program % across * WIDE + tl.arange(0, WIDE)[None, :]
    program = program // across
    m = program % middle
    program = program // middle
    r = program % down * TALL + tl.arange(0, TALL)[:, None]
    at = ((program // down * rows + r) * middle + m) * columns + c
    return r, c, at

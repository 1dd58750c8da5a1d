"""The Hadamard transform and the random numbers, by their definitions, in numpy.

Random numbers are the upper 24 bits of Philox4x32-10's words: the key is the seed, the counter is the position over 4
below and the offset above it, and the position modulo 4 chooses the word.
"""

from __future__ import annotations

import numpy as np

from .captured import Array

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def hadamard(x: Array, axis: int, block: int, signs: Array, left: bool) -> Array:
    """Float32, in the stated order: h = 1, 2, 4, ..; a short last block in powers of two, the largest first."""
    moved = np.moveaxis(x, axis, -1).astype(np.float32)
    extent = moved.shape[-1]
    signed = moved * np.resize(signs, extent).astype(np.float32)
    pieces, start = [], 0
    while start < extent:
        size = min(block, 1 << ((extent - start).bit_length() - 1))
        pieces.append(_butterflies(signed[..., start : start + size], left))  # type: ignore[arg-type]
        start += size
    return np.moveaxis(np.concatenate(pieces, axis=-1), -1, axis).astype(np.float64)


def _butterflies(v: Array, left: bool) -> Array:
    size = v.shape[-1]
    index = np.arange(size)
    h = 1
    while h < size:
        partner = v[..., index ^ h]
        v = np.where(index & h, partner - v, v + partner)
        h *= 2
    k = size.bit_length() - 1
    return v * np.float32(2.0 ** -(-(-k // 2) if left else k // 2))


def random_integers(count: int, seed: int, offset: int) -> Array:
    """The first `count` numbers of a seed and an offset, in [0, 2^24)."""
    number = np.arange(-(-count // 4), dtype=np.uint64)
    high, low = np.uint64(offset >> 32), np.uint64(offset & 0xFFFFFFFF)
    a, b = number & _LOW, number >> _SHIFT
    c, d = np.full_like(number, low), np.full_like(number, high)
    k, m = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (q >> _SHIFT) ^ b ^ np.uint64(k), q & _LOW
        c, d = (p >> _SHIFT) ^ d ^ np.uint64(m), p & _LOW
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    words = np.stack([a, b, c, d], axis=1).reshape(-1)[:count]
    return (words >> np.uint64(8)).astype(np.float64)

"""Random numbers and the Walsh-Hadamard transform by their definitions.

Numbers are Philox4x32-10 (Salmon et al., SC 2011, section 3.3) over arrays, in numpy's 64-bit integers, which represent
32-bit products exactly. The element at a position has the word `position % 4` of the counter whose lower half is
`position // 4` and whose upper half is the offset; its number is the upper 24 bits of the word. The transform is
Sylvester's matrix, with the order of float32 additions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def random_integers(count: int, seed: int, offset: int) -> Array:
    """The numbers in [0, 2^24) of the first `count` elements, int64, for a seed and an offset in [0, 2^64)."""
    counters = np.arange(-(-count // 4), dtype=np.uint64)
    return (words(counters, seed, offset).reshape(-1)[:count] >> np.uint64(8)).astype(np.int64)


def random_integer(position: int, seed: int, offset: int) -> int:
    """The number of the element at a position in [0, 2^66)."""
    counter, word = divmod(position, 4)
    return int(words(np.array([counter], np.uint64), seed, offset)[0, word]) >> 8


def words(counters: Array, seed: int, offset: int) -> Array:
    """The four words of each counter (uint64 [n]) under the upper half `offset` and the key `seed`, uint64 [n, 4]."""
    a, b = counters & _LOW, counters >> _WORD
    c, d = (np.full_like(counters, word) for word in (offset & 0xFFFFFFFF, offset >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (right >> _WORD) ^ b ^ np.uint64(k0), right & _LOW
        c, d = (left >> _WORD) ^ d ^ np.uint64(k1), left & _LOW
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([a, b, c, d], axis=1)


def sylvester(size: int) -> Array:
    """H, as a Kronecker product."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix


def factor(size: int, *, left: bool) -> float:
    """2^-ceil(k/2) for a product's left operand, 2^-floor(k/2) for its right, of 2^k elements."""
    k = size.bit_length() - 1
    return float(2.0 ** -((k + 1) // 2 if left else k // 2))


def butterflies(x: Array, *, left: bool) -> Array:
    """Blocks along the last axis, float32: for h = 1, 2, 4, .. elements i and i + h become their sum and difference."""
    y = x.astype(np.float32).copy()
    size = y.shape[-1]
    low = np.arange(size)
    h = 1
    while h < size:
        i = low[low & h == 0]
        y[..., i], y[..., i + h] = y[..., i] + y[..., i + h], y[..., i] - y[..., i + h]
        h *= 2
    return y * np.float32(factor(size, left=left))


def transformed(x: Array, axis: int, block: int, *, left: bool, signs: Array | None) -> Array:
    """The transform of a tensor; a short last block is split into powers of two, the largest first."""
    lines = np.moveaxis(x, axis, -1).astype(np.float32)
    extent = lines.shape[-1]
    if signs is not None:
        lines = lines * np.resize(signs, extent)
    parts, start, size = [], 0, block
    while start < extent:
        while size > extent - start:
            size //= 2
        parts.append(butterflies(lines[..., start : start + size], left=left))
        start += size
    return np.moveaxis(np.concatenate(parts, axis=-1), -1, axis)


def signs_of(block: int, seed: int, offset: int) -> Array:
    """-1 if an element's random number has the highest bit set, else 1, float32."""
    return np.where(random_integers(block, seed, offset) < 1 << 23, 1, -1).astype(np.float32)

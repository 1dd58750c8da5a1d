"""Philox4x32-10 over arrays, in numpy's 64-bit integers, which represent 32-bit products exactly.

Salmon et al., SC 2011, section 3.3. The element at a position has the word `position % 4` of the counter whose lower
half is `position // 4` and whose upper half is the offset; its number is the upper 24 bits of the word.
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

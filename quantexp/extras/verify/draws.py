"""Philox4x32-10 over arrays, in numpy's 64-bit integers, which represent 32-bit products exactly (see `rational`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def random_integers(count: int, seed: int, offset: int) -> Array:
    """The numbers in [0, 2^24) of the first `count` elements, int64, for a seed and an offset in [0, 2^64)."""
    number = np.arange(-(-count // 4), dtype=np.uint64)
    a, b = number & _LOW, number >> _WORD
    c, d = (np.full_like(number, word) for word in (offset & 0xFFFFFFFF, offset >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (right >> _WORD) ^ b ^ np.uint64(k0), right & _LOW
        c, d = (left >> _WORD) ^ d ^ np.uint64(k1), left & _LOW
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    words = np.stack([a, b, c, d], axis=1).reshape(-1)[:count]
    return (words >> np.uint64(8)).astype(np.int64)

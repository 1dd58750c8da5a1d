"""The Walsh-Hadamard transform by its definition: Sylvester's matrix, and the order of float32 additions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.draws import random_integers

Array = NDArray[Any]


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

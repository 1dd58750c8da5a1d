"""Scales of several levels in rational arithmetic: groups within a block, and corrections over several blocks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.declared_values import Values
from quantexp.extras.verify.rational import floor_log2

Array = NDArray[Any]


def with_micro_exponents(x: Array, d: np.float32, element: Values, sizes: Sequence[int]) -> Array:
    """d of each element of a block of one row: doubled for every group whose amax, in units of it, is too large."""
    factors = np.full(x.shape, d, np.float32)
    for level, size in enumerate(sizes):
        limit = Fraction(2) ** (floor_log2(element.largest) + len(sizes) - level)
        for n in range(0, x.shape[1], size):
            group = slice(None), slice(n, n + size)
            amax = np.float32(np.abs(x[group]).max()) / d
            doubled = (
                Fraction(float(amax)) * Fraction(float(d)) / Fraction(float(factors[group][0, 0]))
            )
            if doubled >= limit:
                factors[group] *= np.float32(2)
    return factors


def correction(pairs: Sequence[tuple[Array, Array]], limit: Fraction, number: int) -> np.float32:
    """sum v^2 / sum v q over blocks of scaled values v and their elements q, with terms in units of a power of two.

    Each term is at most limit^2, and a sum of `number` of them below 2^52 units.
    """
    bound = limit * limit * number
    exponent = floor_log2(bound) + 1
    step = Fraction(2) ** (exponent - 52)
    signal = cross = 0
    for v, q in pairs:
        for a, b in zip(v.flat, q.flat, strict=True):
            inside = min(max(Fraction(float(a)), -limit), limit)
            signal += _nearest(float(inside * inside) / float(step))
            cross += _nearest(float(inside * Fraction(float(b))) / float(step))
    return np.float32(1) if cross == 0 else np.float32(float(signal) / float(cross))


def _nearest(value: float) -> int:
    """The nearest integer, ties to even; squares of float32 values are exact in float64."""
    return round(Fraction(value))


def drawn_scale(scales: Sequence[Fraction], target: np.float32, random: int) -> np.float32:
    """The scale above a target with the chance that keeps the mean, else that below."""
    value = min(max(Fraction(float(target)), scales[0]), scales[-1])
    above = min(max(bisect_right(scales, value), 1), len(scales) - 1)
    low, high = scales[above - 1], scales[above]
    chance = math.floor((value - low) / (high - low) * 2**24)
    return np.float32(float(high if random < chance else low))

"""Bounds of a result: the error of every step is bounded, and rounding, which is monotone, is applied to both ends.

A `Value` carries three arrays through the computation: `nominal`, the steps as declared without any accumulation error,
and `low` <= `high`, between which the computed number must lie whatever the order of summation. Three facts carry it:

1.  A sum of K products in fp32. A product of two operands of at most 8 significant bits each is exact in fp32. Each of
    the K - 1 additions errs by at most 2^-24 of its result where it rounds to nearest, 2^-23 where the hardware
    truncates, and every partial sum is at most sum |a||b| plus such errors. In any order, in any blocking,
    |error| <= K 2^-23 sum |a||b|; K in place of K - 1 pays for the second-order terms (K^2 2^-46, less than 2^-23 for
    K < 2^11) and for our own float64. Flushed denormals add at most K 2^-126. A factor applied in fp32 (the softmax
    scale, itself rounded to fp32) adds two more roundings: K + 2.
2.  One rounding to the working dtype. round() is monotone, so low <= y <= high gives round(low) <= round(y) <=
    round(high). It is sharper than half a unit in the last place (|error| <= 2^-8 |y| for bf16's 8 bits): low and high
    mostly round to the same value, and then the test requires equality bit for bit; else to two neighbours.
3.  Softmax in fp32. P_i = e_i / (e_i + sum of the others) rises with S_i and falls with every other S_j, so its ends
    are exact functions of the ends of S. S - max rounds by 2^-24 |S - max|, which exp turns into a relative error;
    exp itself, T additions and the division add at most T + 8 roundings. Relative: (T + 8 + |S - max|) 2^-23.

Thus an S that may round to either of two neighbours (fact 1 leaves both possible where it lies near their midpoint)
widens P of its row, then o = P v by its share and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .captured import Array
from .grids import rounded

#: One rounding in fp32, to nearest or not.
_STEP = 2.0**-23
#: The most that a flushed denormal of fp32 loses.
_TINY = 2.0**-126


@dataclass(frozen=True)
class Value:
    """A number as declared, and the ends between which it may have been computed."""

    nominal: Array
    low: Array
    high: Array

    @property
    def middle(self) -> Array:
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Array:
        return (self.high - self.low) / 2

    @property
    def largest(self) -> Array:
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def each(self, function: Callable[[Array], Array]) -> Value:
        """A function that never falls (a rounding, a change of layout), on all three."""
        return Value(function(self.nominal), function(self.low), function(self.high))


def exact(x: Array) -> Value:
    """An exactly known number."""
    return Value(x, x, x)


def around(nominal: Array, middle: Array, radius: Array) -> Value:
    return Value(nominal, middle - radius, middle + radius)


def product(a: Value, b: Array, scale: float = 1.0) -> Value:
    """`scale` a b, reduced over a's last and b's last but one dimension in fp32, not yet rounded (fact 1)."""
    num_terms = b.shape[-2]
    error = (num_terms + 2) * (_STEP * (a.largest @ np.abs(b)) + _TINY)
    radius = a.radius @ np.abs(b) + error
    return around(scale * (a.nominal @ b), scale * (a.middle @ b), scale * radius)


def times(a: Value, matrix: Array) -> Value:
    """a times a matrix along its last dimension, added in fp32 in any order, not yet rounded (fact 1)."""
    above, below = np.maximum(matrix, 0), np.minimum(matrix, 0)
    error = len(matrix) * _STEP * (a.largest @ np.abs(matrix)) + _TINY
    low, high = a.low @ above + a.high @ below, a.high @ above + a.low @ below
    return Value(a.nominal @ matrix, low - error, high + error)


def scaled(a: Value, scale: float) -> Value:
    """`scale` a in fp32, `scale` itself rounded to fp32."""
    error = 2 * scale * _STEP * a.largest
    return Value(scale * a.nominal, scale * a.low - error, scale * a.high + error)


def total(a: Value, axis: int) -> Value:
    """The sum over an axis in fp32 (fact 1)."""
    error = a.low.shape[axis] * _STEP * a.largest.sum(axis)
    low, high = a.low.sum(axis) - error, a.high.sum(axis) + error
    return Value(a.nominal.sum(axis), low, high)


def softmax(S: Value, allowed: Array) -> Value:
    """Softmax over the last dimension in fp32, zero where not `allowed`, not yet rounded (fact 3)."""
    top = np.where(allowed, S.high, -np.inf).max(-1, keepdims=True)
    nominal, low, high = (np.exp(x - top) * allowed for x in (S.nominal, S.low, S.high))
    others_low = low.sum(-1, keepdims=True) - low
    others_high = high.sum(-1, keepdims=True) - high
    num_terms = S.low.shape[-1]
    relative = (num_terms + 8 + np.abs(S.low - top)) * _STEP
    return Value(
        nominal / nominal.sum(-1, keepdims=True),
        low / (low + np.maximum(others_high, 0)) * (1 - relative),
        high / (high + np.maximum(others_low, 0)) * (1 + relative),
    )


def softmax_gradient(P: Value, dP: Value) -> Value:
    """dS = P (dP - D) with D = sum P dP in fp32, not yet rounded; P is softmax's own, before rounding.

    The error is fact 1's for D and three roundings for the rest; radii of factors multiply out.
    """
    num_terms = P.low.shape[-1]
    p, d, r_p, r_d = P.middle, dP.middle, P.radius, dP.radius
    D = (p * d).sum(-1, keepdims=True)
    magnitude = (P.largest * dP.largest).sum(-1, keepdims=True)
    r_D = (r_p * np.abs(d) + p * r_d + r_p * r_d).sum(-1, keepdims=True)
    r_D = r_D + (num_terms + 1) * _STEP * magnitude
    r_difference = r_d + r_D
    radius = r_p * np.abs(d - D) + (p + r_p) * r_difference
    radius = radius + 3 * _STEP * P.largest * (dP.largest + magnitude)
    nominal_D = (P.nominal * dP.nominal).sum(-1, keepdims=True)
    return around(P.nominal * (dP.nominal - nominal_D), p * (d - D), radius)


def share_outside(captured: Array, value: Value, dtype: str) -> float:
    """The share of captured elements that do not lie between the rounded ends (fact 2)."""
    low, high = rounded(value.low, dtype), rounded(value.high, dtype)
    return float(np.mean((captured < low) | (captured > high)))


def share_decided(value: Value, dtype: str) -> float:
    """The share of elements whose ends round to one value, so that the test requires equality."""
    return float(np.mean(rounded(value.low, dtype) == rounded(value.high, dtype)))


def distance(captured: Array, value: Value) -> float:
    """Root mean square of captured - nominal, relative to captured's own.

    `nominal` lacks the last rounding, so that even the right answer is one rounding to the working dtype away, some
    2^-8 / sqrt(6) for bf16, never zero: ratios of distances mean something.
    """
    return float(np.linalg.norm(captured - value.nominal) / np.linalg.norm(captured))

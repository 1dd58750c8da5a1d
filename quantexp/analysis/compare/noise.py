"""Tells a mean from noise: intervals and tests over values of which each is one seed's.

Student's t assumes normal values; the sign-flip test (Fisher, The Design of Experiments, 1935, section 21) assumes only
that noise is as often positive as negative, but with n values no p-value of it is below 2^(1-n). Holm's correction
(Scandinavian Journal of Statistics 6, 1979) keeps the chance of a single false alarm among several tests at the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev

#: The chance of a false alarm; intervals hold the mean with the rest.
LEVEL = 0.05
#: Fewer values say nothing about their own spread.
FEWEST = 3
#: More values have too many signs to try.
_MOST_FLIPPED = 20
#: More seeds than these are not counted.
MOST_SEEDS = 1000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of at least two values by Student's t."""
    mean, half = fmean(values), half_width(stdev(values), len(values))
    return mean - half, mean + half


def half_width(deviation: float, n: int) -> float:
    """Of the interval of a mean of n values with this standard deviation."""
    return t_quantile(n - 1) * deviation / math.sqrt(n)


@cache
def t_quantile(freedom: int) -> float:
    """The value that |t| of so many degrees of freedom exceeds with the chance `LEVEL`."""
    low, high = 0.0, 1.0
    while t_p_value(high, freedom) > LEVEL:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_p_value(middle, freedom) > LEVEL else (low, middle)
    return high


@cache
def t_p_value(t: float, freedom: int) -> float:
    """The chance of |t| or more, in either direction, by the incomplete beta function."""
    from mpmath import betainc

    x = freedom / (freedom + t * t)
    return float(betainc(freedom / 2, 0.5, 0, x, regularized=True))


def mean_p_value(values: Sequence[float]) -> float:
    """The p-value of a mean of zero by Student's t; of equal values 0, or 1 if they are zero."""
    mean, deviation = fmean(values), stdev(values)
    if deviation == 0:
        return float(mean == 0)
    return t_p_value(abs(mean) / (deviation / math.sqrt(len(values))), len(values) - 1)


def sign_flip_p_value(values: Sequence[float]) -> float | None:
    """The share of all choices of signs whose sum is as far from zero; None if none can be below `LEVEL`, or too many.

    Sums that rounding alone distinguishes count as equal.
    """
    n = len(values)
    if 2.0 ** (1 - n) > LEVEL or n > _MOST_FLIPPED:
        return None
    import numpy as np

    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    tolerance = 1e-12 * sum(map(abs, values))
    return float(np.mean(np.abs(sums) >= abs(sum(values)) - tolerance))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number, in the same order."""
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def seeds_needed(mean: float, deviation: float) -> int | None:
    """The number of seeds whose interval would leave zero out, if mean and spread stay; None beyond `MOST_SEEDS`."""
    if half_width(deviation, MOST_SEEDS) >= abs(mean):
        return None
    low, high = FEWEST - 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(deviation, middle) < abs(mean) else (middle, high)
    return high


def floor_of(differences: Sequence[float]) -> float | None:
    """What a difference of two runs that are the same but for chance exceeds with the chance `LEVEL`.

    The mean of such differences is known to be zero, so each is a degree of freedom. None without one.
    """
    if not differences:
        return None
    mean_square = fmean(value * value for value in differences)
    return t_quantile(len(differences)) * math.sqrt(mean_square)

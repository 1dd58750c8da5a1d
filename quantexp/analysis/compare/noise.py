"""Tells a mean from noise: intervals and tests over values of which each is one seed's.

Student's t assumes normal values; the sign-flip test (Fisher, The Design of Experiments, 1935, section 21) assumes only
that noise is as often positive as negative, but with n values no p-value of it is below 2^(1-n). Holm's correction
(Scandinavian Journal of Statistics 6, 1979) keeps the chance of a single false alarm among several tests at the level.

Three to five values do not show the shape of their noise: of noise with a long tail, they often are close together and
far from its mean. `is_clear` therefore takes the size of noise from other runs, and `is_sound` needs six values.

With a mean of W standard deviations and a skewness of -g, a tail that points from the mean towards zero, Hall's
transformation (Journal of the Royal Statistical Society B 54, 1992) of Student's t of n values,

    root(n) (W - g W^2 / 3 + g^2 W^3 / 27 - g / (6 n))

has no skewness left. A few values show less skewness than their noise has, so `skew_p_value` takes c g in place of
g, and n - c degrees of freedom, with c = 16 / n, at least 1.4. Beyond g W = 4.5 the expression would rise with g: there
it stays at a quarter of t. A tail that points away from zero counts as none.
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
#: Fewer values have the same sign by chance in more than `LEVEL` of cases.
FEWEST_ALONE = 6
#: Of `skew_p_value` and `is_clear`, chosen by `benchmarks/false_alarms.py --shapes`.
_SKEW, _LEAST_SKEW, _SPREAD = 16.0, 1.4, 2.0
#: The product of distance and skewness at which Hall's transformation is smallest.
_LARGEST_SKEW = 4.5
#: More values have too many signs to try.
_MOST_FLIPPED = 20
#: More seeds than these are not counted.
MOST_SEEDS = 100


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
def t_p_value(t: float, freedom: float) -> float:
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


def skew_p_value(values: Sequence[float]) -> float:
    """The p-value of a mean of zero without what a tail towards zero adds to Student's t; at least six values."""
    mean, deviation = fmean(values), stdev(values)
    if deviation == 0:
        return float(mean == 0)
    return _skew_p_value(abs(mean) / deviation, _tail_to_zero(values), len(values))


def _skew_p_value(distance: float, tail: float, n: int) -> float:
    """For a mean of so many standard deviations."""
    c = max(_LEAST_SKEW, _SKEW / n)
    w = distance
    g = min(c * max(0.0, tail), _LARGEST_SKEW / w) if w else 0.0
    t = math.sqrt(n) * (w - g * w**2 / 3 + g**2 * w**3 / 27 - g / (6 * n))
    return t_p_value(max(0.0, t), n - c)


def is_sound(values: Sequence[float], p_holm: float | None = None) -> bool:
    """Whether six or more values show by themselves that no odd shape of noise explains a small p-value of their mean.

    The sign-flip test must agree, as far as it can be made, and so must `skew_p_value`, multiplied as Holm's correction
    multiplied Student's p-value to give `p_holm`.
    """
    sign_flip = sign_flip_p_value(values)
    if len(values) < FEWEST_ALONE or not (sign_flip is None or sign_flip < LEVEL):
        return False
    p_value = mean_p_value(values)
    factor = p_holm / p_value if p_holm is not None and p_value else 1.0
    return factor * skew_p_value(values) < LEVEL


def _tail_to_zero(values: Sequence[float]) -> float:
    """The skewness m3 / m2^(3/2), positive if the longer tail points from the mean towards zero."""
    mean = fmean(values)
    second, third = (fmean((value - mean) ** k for value in values) for k in (2, 3))
    skewness = third / second**1.5 if second else 0.0
    return -math.copysign(skewness, skewness * mean)


def seeds_for_skewness(values: Sequence[float]) -> int | None:
    """The number of seeds that would be sound if mean, spread and skewness stay; None beyond `MOST_SEEDS`."""
    distance, tail = abs(fmean(values)) / stdev(values), _tail_to_zero(values)
    numbers = range(FEWEST_ALONE, MOST_SEEDS + 1)
    return next((n for n in numbers if _skew_p_value(distance, tail, n) < LEVEL), None)


def is_clear(values: Sequence[float], floor: float, deviation: float) -> bool:
    """Whether values are far beyond the noise of other runs: `floor_of` their differences, which have this deviation.

    The whole interval lies beyond the floor, and the values spread at most twice as much as those differences, so that
    they have no other noise of their own.
    """
    low, high = interval(values)
    return max(low, -high) > floor and stdev(values) <= _SPREAD * deviation


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number, in the same order."""
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def seeds_needed(mean: float, deviation: float) -> int | None:
    """The number of seeds whose interval would leave zero out, if mean and spread stay; None beyond `MOST_SEEDS`.

    It is at least `FEWEST_ALONE`.
    """
    if half_width(deviation, MOST_SEEDS) >= abs(mean):
        return None
    low, high = FEWEST_ALONE - 1, MOST_SEEDS
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


def seed_floor(levels: Sequence[float]) -> float | None:
    """What the difference of two such levels, each of another seed, exceeds with the chance `LEVEL`; None below two."""
    if len(levels) < 2:
        return None
    return t_quantile(len(levels) - 1) * math.sqrt(2) * stdev(levels)

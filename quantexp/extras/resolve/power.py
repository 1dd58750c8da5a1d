"""The smallest difference that Student's t-test over n values detects, by the noncentral t distribution.

For values of mean d and standard deviation s, t = mean / (s / root n) has the noncentrality d / (s / root n). With S
the square root of a chi-squared variable over its degrees of freedom v, and c the critical value,

    P(|t| > c) = E[Phi(delta - c S) + Phi(-delta - c S)]

which is integrated over the density of S by Simpson's rule.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

from quantexp.analysis.compare.noise import t_quantile

#: The chance to detect the difference; the test is two-sided, at `noise.LEVEL`.
POWER = 0.8
_INTERVALS = 400
_PHI = NormalDist().cdf


def smallest_gap(deviation: float, n: int) -> float:
    """The mean of n values with this standard deviation that is detected with the chance `POWER`; n at least 2."""
    return _noncentrality(n - 1) * deviation / math.sqrt(n)


@cache
def _noncentrality(freedom: int) -> float:
    """The noncentrality at which the test has the power `POWER`."""
    low, high = 0.0, 1.0
    while power(high, freedom) < POWER:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, freedom) < POWER else (low, middle)
    return high


def power(noncentrality: float, freedom: int) -> float:
    """The chance that the two-sided test finds a mean of this noncentrality."""
    critical = t_quantile(freedom)
    reach = 9 / math.sqrt(2 * freedom)  # beyond nine deviations of S nothing is left
    low, high = max(0.0, 1 - reach), 1 + reach
    width = (high - low) / _INTERVALS
    total = 0.0
    for index in range(_INTERVALS + 1):
        s = low + index * width
        weight = 1 if index in (0, _INTERVALS) else 4 if index % 2 else 2
        found = _PHI(noncentrality - critical * s) + _PHI(-noncentrality - critical * s)
        total += weight * found * _density(s, freedom)
    return total * width / 3


def _density(s: float, freedom: int) -> float:
    """The density of root(chi-squared / freedom) at s."""
    if s == 0:
        return math.sqrt(2 / math.pi) if freedom == 1 else 0.0
    half = freedom / 2
    log = math.log(2) + half * math.log(half) - math.lgamma(half)
    return math.exp(log + (freedom - 1) * math.log(s) - half * s * s)

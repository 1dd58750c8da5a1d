"""A running mean, for curves of so many iterations that each hides the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

#: Losses from which on a mean is drawn, and the share of them that it is over.
_MANY, _SHARE = 200, 0.02


def window_of(count: int) -> int:
    """How many values a mean is over; 1 is no mean."""
    return max(1, round(_SHARE * count)) if count >= _MANY else 1


def running_mean(y: Sequence[float], window: int) -> list[float]:
    """At each place the mean of the values from window // 2 before it to as many behind it, as far as there are any."""
    sums = list(accumulate(y, initial=0.0))
    half = window // 2
    ends = ((max(0, i - half), min(len(y), i + half + 1)) for i in range(len(y)))
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]

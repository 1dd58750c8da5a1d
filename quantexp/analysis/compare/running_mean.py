"""The running mean that figures and pages draw over many losses. Needs no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

#: The minimum number of losses for a mean, and the fraction of them in its window.
_MANY, _SHARE = 200, 0.02


def window_of(count: int) -> int:
    """The window of the mean; 1 means no mean."""
    return max(1, round(_SHARE * count)) if count >= _MANY else 1


def running_mean(y: Sequence[float], window: int) -> list[float]:
    """The centred running mean over window // 2 values on each side, truncated at the ends."""
    sums = list(accumulate(y, initial=0.0))
    half = window // 2
    ends = ((max(0, i - half), min(len(y), i + half + 1)) for i in range(len(y)))
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]

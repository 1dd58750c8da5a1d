"""The running mean that figures and pages draw over many losses. Needs no matplotlib."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
#: The minimum number of losses for a mean, and the fraction of them in its window.
_MANY, _SHARE = 200, 0.02


def window_of(count: int) -> int:
    """The window of the mean; 1 means no mean."""
    return max(1, round(_SHARE * count)) if count >= _MANY else 1


def running_mean(y: Values, window: int) -> Values:
    """The centred running mean over window // 2 values on each side, truncated at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    places, half = np.arange(len(y)), window // 2
    starts, ends = np.maximum(0, places - half), np.minimum(len(y), places + half + 1)
    means: Values = (sums[ends] - sums[starts]) / (ends - starts)
    return means

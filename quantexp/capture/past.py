"""The recent past of one number of a run, and how far its next value lies beyond it.

The deviation of a value is its distance above the median, in robust standard deviations: 1.4826 times the median
distance from the median (MAD), which is the standard deviation of a normal distribution (Rousseeuw and Croux,
"Alternatives to the Median Absolute Deviation", 1993, sec. 1). Neither moves when a few values are extreme, so a spike
does not hide the next one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

#: MAD to standard deviation, for normally distributed values.
CONSISTENT = 1.4826
#: Fewer values are no past.
FEWEST = 16
#: The smallest deviation, relative to the median: a number that hardly moves has no spike of its last digits.
_LEAST_RELATIVE = 1e-3


class Past:
    """The last values of a number, at most `window`."""

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """Add a value; one that is not finite is left out."""
        if math.isfinite(value):
            self._values.append(value)

    def deviations(self, value: float) -> float | None:
        """How many robust standard deviations a value lies above the median; None before there are `FEWEST`."""
        if len(self._values) < FEWEST or not math.isfinite(value):
            return None
        median, deviation = centre_and_deviation(list(self._values))
        return (value - median) / deviation

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self._values)


def centre_and_deviation(values: list[float]) -> tuple[float, float]:
    """The median and the robust standard deviation, which is never 0."""
    median = statistics.median(values)
    deviation = CONSISTENT * statistics.median(abs(value - median) for value in values)
    return median, max(deviation, _LEAST_RELATIVE * abs(median), 1e-12)

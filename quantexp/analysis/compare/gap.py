"""The gap: the loss above the baseline's, paired by iteration; and the running mean that figures draw over many losses.

Needs no matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from quantexp.runs.metrics import LossCurve

#: The last fraction of the common iterations over which `late` is the mean.
LATE_SHARE = 0.1


def late_window(first: int, last: int, length: int | None = None) -> tuple[int, int]:
    """The first and the last iteration of a window that ends with `last`.

    It has `length` iterations, but none before `first`; None is a tenth of those from `first` on, at least one.
    """
    length = max(1, round(LATE_SHARE * (last - first + 1))) if length is None else length
    return max(first, last - length + 1), last


def values_in(window: tuple[int, int], curve: LossCurve | Gap) -> list[float]:
    """The values of the iterations of a window that the curve has."""
    first, last = window
    values = curve.gaps if isinstance(curve, Gap) else curve.losses
    return [x for i, x in zip(curve.iterations, values, strict=True) if first <= i <= last]


@dataclass(frozen=True)
class Gap:
    """Differences of training loss in nats per token, without iterations in which either loss is not finite."""

    iterations: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def iteration(self) -> int:
        """The last common iteration."""
        return self.iterations[-1]

    @property
    def last(self) -> float:
        """The gap at the last common iteration."""
        return self.gaps[-1]

    @property
    def num_late(self) -> int:
        """The number of iterations of the final mean, at least one; fewer than the last tenth if some are missing."""
        return len(self._late)

    @property
    def late(self) -> float:
        """The mean over the last tenth, because a single iteration's loss and gap vary with the batch."""
        return fmean(self._late)

    @property
    def _late(self) -> list[float]:
        return values_in(late_window(self.iterations[0], self.iteration), self)


def gap_to(here: LossCurve, baseline: LossCurve) -> Gap | None:
    """The gap of a run to its baseline; None without an iteration in which both losses are finite."""
    other = dict(zip(baseline.iterations, baseline.losses, strict=True))
    pairs = [
        (iteration, loss - other[iteration])
        for iteration, loss in zip(here.iterations, here.losses, strict=True)
        if iteration in other
    ]
    if not pairs:
        return None
    iterations, gaps = zip(*pairs, strict=True)
    return Gap(iterations, gaps)


def milestones(iterations: tuple[int, ...], count: int) -> list[int]:
    """At most `count` iterations, evenly spaced, including the first and the last; none if `count` is below 2."""
    if count < 2:
        return []
    if len(iterations) <= count:
        return list(iterations)
    step = (len(iterations) - 1) / (count - 1)
    return [iterations[round(i * step)] for i in range(count)]


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

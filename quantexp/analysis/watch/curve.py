"""All losses of a run, 16 bytes an iteration, and what a page draws of them.

The losses are those of `quantexp.runs.metrics.loss_curve`, the gap is `quantexp.analysis.compare.gap`'s, and lines are
thinned as in the report; here with arrays, because a page of ten long runs is made anew every few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.analysis.compare.gap import LATE_SHARE
from quantexp.analysis.compare.running_mean import window_of
from quantexp.analysis.report.series import MAX_POINTS

Iterations = NDArray[np.int64]
Values = NDArray[np.float64]
#: Iterations and values, as many of each.
XY = tuple[Iterations, Values]
#: The room that a curve begins with.
_ROOM = 256
_DIGITS = 6


class Curve:
    """The losses by ascending iteration; NaN where a loss is not finite."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget everything."""
        self._count = 0
        self._x: Iterations = np.empty(_ROOM, np.int64)
        self._y: Values = np.empty(_ROOM, np.float64)

    def add(self, iterations: Sequence[int], losses: Sequence[float]) -> None:
        """Add losses; of an iteration that was repeated the last one counts."""
        if not len(iterations):
            return
        x, y = np.asarray(iterations, np.int64), np.asarray(losses, np.float64)
        is_ascending = bool(np.all(x[1:] > x[:-1]))
        if is_ascending and (not self._count or x[0] > self._x[self._count - 1]):
            self._append(x, y)
            return
        x, y = (
            np.concatenate([self._x[: self._count], x]),
            np.concatenate([self._y[: self._count], y]),
        )
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
        is_last = np.append(x[1:] != x[:-1], True)
        self._x, self._y = x[is_last], y[is_last]
        self._count = len(self._x)

    def _append(self, x: Iterations, y: Values) -> None:
        end = self._count + len(x)
        if end > len(self._x):
            room = max(end, len(self._x) * 3 // 2) - self._count
            self._x = np.concatenate([self._x[: self._count], np.empty(room, np.int64)])
            self._y = np.concatenate([self._y[: self._count], np.empty(room, np.float64)])
        self._x[self._count : end], self._y[self._count : end] = x, y
        self._count = end

    @property
    def finite(self) -> XY:
        """The iterations with a finite loss, and their losses."""
        x, y = self._x[: self._count], self._y[: self._count]
        kept = np.isfinite(y)
        return (x, y) if kept.all() else (x[kept], y[kept])

    @property
    def num_nonfinite(self) -> int:
        """The number of iterations whose loss is not finite."""
        return int(np.count_nonzero(~np.isfinite(self._y[: self._count])))


def gap(here: XY, baseline: XY) -> XY:
    """The loss above the baseline's in the iterations that both have."""
    x, mine, other = np.intersect1d(here[0], baseline[0], assume_unique=True, return_indices=True)
    return x, here[1][mine] - baseline[1][other]


def late_mean(values: Values) -> float:
    """The mean of the last tenth, of at least one value."""
    return float(values[-max(1, round(LATE_SHARE * len(values))) :].mean())


def thinned(line: XY, limit: int = MAX_POINTS) -> XY:
    """All points, or the least and the largest of each of `limit`/2 segments, in order, and both ends."""
    x, y = line
    if len(x) <= limit:
        return line
    num_segments = limit // 2 - 1
    starts = np.arange(num_segments + 1) * len(x) // num_segments
    kept = {0, len(x) - 1}
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        segment = y[start:end]
        kept |= {start + int(segment.argmin()), start + int(segment.argmax())}
    places = sorted(kept)
    return x[places], y[places]


def running_mean(y: Values, window: int) -> Values:
    """The centred mean over window // 2 values on each side, cut at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    places, half = np.arange(len(y)), window // 2
    starts, ends = np.maximum(0, places - half), np.minimum(len(y), places + half + 1)
    means: Values = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def drawn(line: XY) -> dict[str, Any]:
    """A line as the page's charts take it: points, their running mean if there are many, and its window."""
    x, y = line
    window, mean = window_of(len(y)), (x[:0], y[:0])
    if window > 1:
        step = max(1, len(y) // (MAX_POINTS // 2))
        places = np.append(np.arange(0, len(y) - 1, step), len(y) - 1)
        mean = x[places], running_mean(y, window)[places]
    return {"points": _listed(thinned(line)), "mean": _listed(mean), "window": window, "band": None}


def _listed(line: XY) -> list[list[Any]]:
    return [line[0].tolist(), [float(f"{value:.{_DIGITS}g}") for value in line[1].tolist()]]

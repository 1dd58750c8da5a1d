"""All losses of a run, 16 bytes an iteration, and their gap to those of another run.

The losses are those of `quantexp.runs.metrics.loss_curve`, the gap is `quantexp.analysis.compare.gap`'s; here with
arrays, because a page of ten long runs is made anew every few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quantexp.analysis.compare.gap import Values, late_window
from quantexp.analysis.report.series import XY

Iterations = NDArray[np.int64]
#: The room that a curve begins with.
_ROOM = 256


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


def late_mean(line: XY) -> float:
    """The mean over the last tenth of the iterations."""
    iterations, values = line
    first, _ = late_window(int(iterations[0]), int(iterations[-1]))
    return float(values[iterations >= first].mean())

"""Follows the metrics.jsonl of one run: all its losses, their gap to those of another run, and its latest lines.

A piece of the file is parsed at once, ten times as fast as line by line; a piece with a line that is not what it
must be is parsed line by line, and the wrong lines are left out. Until a large file has been read, a sketch stands for
its losses: those of some lines at even distances.

Losses take 16 bytes an iteration. They are those of `quantexp.runs.metrics.loss_curve`, the gap is
`quantexp.analysis.compare.gap`'s; here with arrays, because a page of ten long runs is made anew every few seconds.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.analysis.compare.gap import Values, late_window
from quantexp.analysis.report.series import XY
from quantexp.errors import UnreadableError
from quantexp.extras.forensics.watch.tail import PIECE, Piece, Tail
from quantexp.reading.files import open_file
from quantexp.reading.json_files import Line, flat_values, value_of
from quantexp.runs.metrics import WINDOW, MetricsLine
from quantexp.runs.paths import RunDir

#: Bytes of a file that is sketched first, the lines of a sketch, and the bytes in which each of them is looked for.
SKETCHED_BYTES, SKETCH_LINES, _SKETCH_PIECE = 4 << 20, 400, 1 << 12
#: Wrong lines that are named.
_MOST_DAMAGE = 3


class FollowedMetrics:
    """The metrics of one run, as far as they have been read."""

    def __init__(self, run: RunDir) -> None:
        self.tail, self.curve = Tail(run.metrics), Curve()
        self.sketch: Curve | None = None
        #: The latest lines, and the first one with a finite loss.
        self.latest: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._first: dict[str, Any] | None = None
        #: What is wrong with lines, which are left out.
        self.damage: list[str] = []
        #: Whether the lines that the file had at the last look have been read.
        self.is_whole = False

    @property
    def line(self) -> XY:
        """The finite losses: all of them, or the sketch's until they have been read."""
        return (self.curve if self.sketch is None else self.sketch).finite

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines that tell all but the curve: the first one with a finite loss, and the latest ones."""
        return [*([] if self._first is None else [self._first]), *self.latest]

    def read(self, most: int = PIECE) -> bool:
        """Read the next piece; returns whether anything has changed."""
        try:
            piece = self.tail.read(most)
        except UnreadableError as error:
            self.is_whole = True
            changed, self.damage = str(error) not in self.damage, [str(error)]
            return changed
        if piece.is_anew:
            self.curve.clear()
            self.latest.clear()
            self._first, self.sketch, self.damage = None, None, []
        if not piece.start and self.tail.size > SKETCHED_BYTES and piece.text:
            self.sketch = self._sketched()
        self._add(piece)
        self.is_whole = piece.is_last
        if self.is_whole:
            self.sketch = None
        return bool(piece.text) or piece.is_anew

    def _add(self, piece: Piece) -> None:
        iterations: list[int] = []
        losses: list[float] = []
        values = self._values(piece)
        for value in values:
            if "loss" in value:
                loss = value["loss"]
                iterations.append(value["iteration"])
                losses.append(math.nan if loss is None else loss)
        self.curve.add(iterations, losses)
        self.latest.extend(values[-WINDOW:])
        if self._first is None:
            self._first = next((v for v in values if v.get("loss") is not None), None)

    def _values(self, piece: Piece) -> Sequence[dict[str, Any]]:
        if not piece.text:
            return ()
        values = flat_values(piece.text)
        if values is not None and all(map(_is_usual, values)):
            return values
        return [dict(value) for value in self._one_by_one(piece)]

    def _one_by_one(self, piece: Piece) -> Iterator[MetricsLine]:
        offset = piece.start
        for text in piece.text.splitlines(keepends=True):
            line = Line(offset, offset, text)
            offset += len(text)
            if not text.isspace():
                value = value_of(line, self.tail.file, MetricsLine, self._report)
                if value is not None:
                    yield value

    def _report(self, error: UnreadableError) -> None:
        if len(self.damage) < _MOST_DAMAGE:
            self.damage.append(str(error).replace(", line ", ", the line at byte "))

    def _sketched(self) -> Curve:
        """The losses of lines at even distances; the file's end is among them."""
        curve, values = Curve(), []
        try:
            with open_file(self.tail.file) as stream:
                last = max(0, self.tail.size - _SKETCH_PIECE)
                for i in range(SKETCH_LINES):
                    start = last * i // (SKETCH_LINES - 1)
                    lines = os.pread(stream.fileno(), _SKETCH_PIECE, start).splitlines(True)
                    values += [v for v in flat_values(b"".join(lines[1:2])) or () if _is_usual(v)]
        except (OSError, UnreadableError):
            return curve
        curve.add(
            [value["iteration"] for value in values],
            [math.nan if (loss := value.get("loss")) is None else loss for value in values],
        )
        return curve


def _is_usual(value: Mapping[str, Any]) -> bool:
    """Whether a line is what a run writes, as far as the losses need it."""
    return (
        type(value.get("iteration")) is int
        and value["iteration"] >= 0
        and type(value.get("loss")) in (float, int, type(None))
    )


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

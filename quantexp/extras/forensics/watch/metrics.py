"""Follows the metrics.jsonl of one run: all its losses, and its latest lines.

A piece of the file is parsed at once, ten times as fast as line by line; a piece with a line that is not what it
must be is parsed line by line, and the wrong lines are left out. Until a large file has been read, a sketch stands for
its losses: those of some lines at even distances.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantexp.analysis.report.series import XY
from quantexp.errors import UnreadableError
from quantexp.extras.forensics.watch.curve import Curve
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

"""Reads curves.jsonl: the statistics of captured tensors that trackers receive, a line for each captured iteration.

Rank 0 appends the line of an iteration before that iteration's line of metrics.jsonl.
"""

from __future__ import annotations

from typing import Any, BinaryIO, Required, TypedDict

from quantexp.errors import UnreadableError
from quantexp.reading.json_files import lines_from, value_of
from quantexp.reading.typed import Count
from quantexp.runs.paths import RunDir


class CurvesLine(TypedDict, total=False):
    """A line of curves.jsonl."""

    iteration: Required[Count]
    #: Tag -> value.
    scalars: dict[str, float]
    #: Tag -> counts by exponent of two, as in the statistics' `log2_magnitude`.
    histograms: dict[str, dict[str, Any]]


class CurveLines:
    """The lines of a run's curves.jsonl, by iteration; the file may be missing, and may grow."""

    def __init__(self, run: RunDir) -> None:
        self._file = run.curves
        self._stream: BinaryIO | None = None
        self._end = 0
        #: Iteration -> the position of its last line.
        self._places: dict[int, int] = {}

    def at(self, iteration: int) -> CurvesLine | None:
        """The line of an iteration; None if there is none, or not yet. Wrong lines are left out."""
        if self._stream is None:
            if not self._file.exists():
                return None
            self._stream = self._file.open("rb")
        self._stream.seek(self._end)
        for line in lines_from(self._stream, self._file, _ignore):
            if not line.is_ended:
                break
            self._end = line.offset + len(line.text)
            if (value := value_of(line, self._file, CurvesLine, _ignore)) is not None:
                self._places[value["iteration"]] = line.offset
        place = self._places.get(iteration)
        if place is None:
            return None
        self._stream.seek(place)
        line = next(lines_from(self._stream, self._file, _ignore))
        return value_of(line, self._file, CurvesLine, _ignore)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


def _ignore(error: UnreadableError) -> None:
    """Trackers receive what can be read."""

"""The content of each captured tensor in the report: its statistics, and the quantisation error of its slots.

Statistics are the capture's. Slots are judged by values, in the formats that the run declared, or in `ASSUMED` where it
quantises nothing; of statistics alone there is what `capture.format` judged. What the run's table of measures has is
taken from it; the rest is measured until the `Deadline`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantexp.analysis.measures.measured import (
    Measured,
    Request,
    is_quantised,
    measure,
    of_statistics,
)
from quantexp.analysis.measures.table import MeasuresTable
from quantexp.analysis.quick.first_look import ASSUMED
from quantexp.analysis.report.slots import SlotCell, State, number, slots_of_tensor
from quantexp.analysis.tensors.largest import largest_words
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.counts import from_json
from quantexp.errors import CaptureError
from quantexp.runs.paths import RunDir

_NUMBERS = (
    "count",
    "abs_max",
    "kurtosis",
    "zero_share",
    "mean",
    "std",
    "min",
    "max",
    "skew",
    "nonfinite",
)


class Judge:
    """Computes the quantisation error of the tensors of one capture, each once."""

    def __init__(self, run: RunDir, entries: Sequence[CapturedTensor], deadline: Deadline) -> None:
        self._deadline = deadline
        #: Whether the run quantises nothing, so that its operands are judged in the format `ASSUMED`.
        self.is_assumed = not any(map(is_quantised, entries))
        self._request = Request((ASSUMED,) if self.is_assumed else (), operands_only=True)
        self._table = MeasuresTable(run.figures)
        self._known: dict[tuple[Any, ...], Measured | State] = {}
        #: The number of tensors skipped after the deadline.
        self.num_late = 0

    def tensor(self, entry: CapturedTensor) -> dict[str, Any]:
        """The content of a tensor in the report."""
        measured = self._measured(entry)
        numbers = _numbers(entry.metadata.get("statistics"), measured)
        counts = numbers.pop("log2_magnitude", None) or {}
        exponents = from_json(counts)
        outside = [counts.get(side) or 0 for side in ("below", "above")]
        shown = {key: n for key in _NUMBERS if (n := number(numbers.get(key))) is not None}
        if (crest := _crest(shown)) is not None:
            shown["crest"] = crest
        content = {
            **shown,
            "dtype": str(entry.metadata.get("dtype") or ""),
            "shape": " x ".join(map(str, entry.metadata.get("shape") or ())),
            "bins": [exponents.first, list(exponents.counts), *outside],
        }
        if not isinstance(measured, State) and measured.largest:
            content["tokens"] = largest_words(measured.largest)
        return content if shown else {**content, "state": _state(measured)}

    def slots(self, entry: CapturedTensor) -> Iterator[SlotCell]:
        """The slots of a tensor."""
        yield from slots_of_tensor(entry.metadata, self._measured(entry))

    def _measured(self, entry: CapturedTensor) -> Measured | State:
        key = _key(entry.metadata)
        if key not in self._known:
            self._known[key] = self._look(entry)
        return self._known[key]

    def _look(self, entry: CapturedTensor) -> Measured | State:
        try:
            if not entry.metadata.get("file"):
                return of_statistics(entry.metadata)
            if (known := self._table.measured(entry, self._request)) is not None:
                return known
            if not self._deadline.passed:
                return measure(entry, self._request)
        except (CaptureError, OSError):
            return State.FAILED
        self.num_late += 1
        return State.LATE


def _key(known: Mapping[str, Any]) -> tuple[Any, ...]:
    """The identity of a tensor in both passes: a weight is listed for each pass and stored once."""
    keys = ("module", "layer", "tensor", "iteration", "micro_batch", "rank")
    return tuple(known.get(key) for key in keys)


def _numbers(statistics: object, measured: Measured | State) -> dict[str, Any]:
    """The captured statistics, or statistics of the values if there are none."""
    if isinstance(statistics, dict) and statistics:
        return dict(statistics)
    return {} if isinstance(measured, State) else dict(vars(measured))


def _crest(shown: Mapping[str, float]) -> float | int | None:
    """The largest magnitude over the root mean square."""
    if not {"abs_max", "mean", "std"} <= shown.keys():
        return None
    rms = math.hypot(shown["mean"], shown["std"])
    return number(shown["abs_max"] / rms) if rms > 0 else None


def _state(measured: Measured | State) -> State:
    if isinstance(measured, State):
        return measured
    return State.STATISTICS if not measured.from_values else State.EMPTY


class Deadline:
    """A deadline; None means no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self._end is not None and time.monotonic() > self._end

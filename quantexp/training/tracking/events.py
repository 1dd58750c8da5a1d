"""The data that all trackers receive: the run, its hyperparameters, points of its curves, its end.

A tag is a key of metrics.jsonl in one of two groups: `perf/` for the speed and memory of the machine, `train/` for all
other numbers. The tags of curves.jsonl are those of `quantexp.capture.select.curves`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from quantexp.capture.statistics.counts import Counts, from_json
from quantexp.reading.json_files import json_of
from quantexp.runs.curves import CurveLines, CurvesLine
from quantexp.runs.metrics import ALWAYS_MEASURED
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import Experiment

#: Keys of metrics.jsonl that are axes, not curves.
_AXES = ("iteration", "tokens", "time")
_PERFORMANCE = ("step_time_s", "tokens_per_s", "tflops", "mfu", "memory_gb")
#: Tokens of all iterations up to this one, an alternative x axis.
TOKENS_SEEN = "train/tokens_seen"
LOSS = "train/loss"
#: The largest number of points that are read at once.
MAX_POINTS = 500

Value = str | int | float | bool


@dataclass(frozen=True)
class TrackedRun:
    """One attempt at a run."""

    folder: RunDir
    experiment: Experiment
    attempt: int
    #: The time of the attempt's creation in status.json.
    created: str

    @property
    def name(self) -> str:
        """The run folder's name and the attempt."""
        return f"{self.folder.root.name}.{self.attempt}"

    @property
    def id(self) -> str:
        """16 hex digits of name and creation: equal after a restart, different for an equal run elsewhere."""
        return hashlib.sha256(f"{self.name}\n{self.created}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Point:
    """One iteration's values of all curves."""

    iteration: int
    #: Seconds since 1970, UTC.
    time_s: float
    #: Tag -> value; NaN and Inf included.
    scalars: dict[str, float]
    #: Tag -> counts by floor(log2 |x|).
    histograms: dict[str, Counts] = field(default_factory=dict)


class Tracker(Protocol):
    """One run in one tracker. Every method may raise any error of its library."""

    #: The tracker's own id of the run, by which a later process continues it.
    id: str
    #: Where a person finds the run: an address, or a path from the run folder.
    where: str

    def log(self, points: Sequence[Point]) -> None:
        """Add points, ascending."""

    def end(self, state: State, reason: str) -> None:
        """End the run; the last call."""


def point(line: Mapping[str, Any], curves: CurvesLine | None = None) -> Point:
    """The point of a line of metrics.jsonl and of the same iteration's line of curves.jsonl; `time` is ISO 8601.

    Raises:
        KeyError, TypeError, ValueError: it is not such a line.
    """
    iteration = int(line["iteration"])
    scalars = dict(_scalars(line))
    scalars[TOKENS_SEEN] = float(iteration * int(line["tokens"]))
    curves = curves or CurvesLine(iteration=iteration)
    scalars |= curves.get("scalars", {})
    histograms = {tag: from_json(counts) for tag, counts in curves.get("histograms", {}).items()}
    return Point(iteration, datetime.fromisoformat(line["time"]).timestamp(), scalars, histograms)


class PointReader:
    """The points of metrics.jsonl, with those of curves.jsonl; both files may be missing, and may grow."""

    def __init__(self, run: RunDir) -> None:
        self._file, self._curves, self._offset = run.metrics, CurveLines(run), 0

    def read(self) -> list[Point]:
        """The next points, at most MAX_POINTS; an empty list if there are none yet.

        An incomplete last line is left for later. Lines of another version are skipped.
        """
        points: list[Point] = []
        if not self._file.exists():
            return points
        with self._file.open("rb") as metrics:
            offset = metrics.seek(self._offset)
            while len(points) < MAX_POINTS and (line := metrics.readline()).endswith(b"\n"):
                offset += len(line)
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    values = json_of(line)
                    points.append(point(values, self._curves.at(int(values["iteration"]))))
        self._offset = offset  # an error before repeats the lines
        return points

    def close(self) -> None:
        """Close curves.jsonl."""
        self._curves.close()


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        group = "perf" if key in _PERFORMANCE else "train"
        if key in _AXES or (key == "skipped" and not value and line.get("loss_scale") is None):
            continue  # without a loss scale, a step is rarely left out
        if value is None and key in ALWAYS_MEASURED:
            yield f"{group}/{key}", math.nan
        elif isinstance(value, bool | int | float):
            yield f"{group}/{key}", float(value)


def hyperparameters(experiment: Experiment) -> dict[str, Value]:
    """The configuration of a run by full key, without null and empty values and keys of this machine."""
    dataset, launcher = experiment.dataset, experiment.launcher
    sections = {
        "model": asdict(experiment.model),
        "dataset": {"label": dataset.label, "split": dataset.split},
        "quant": asdict(experiment.quant),
        "training": asdict(experiment.training),
        "capture": {"level": experiment.capture.level},
        "launcher": {"num_processes": launcher.num_processes},
    }
    return dict(_flat(sections, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Value]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            yield f"{prefix}{key}", json.dumps(value)
        elif isinstance(value, Enum):
            yield f"{prefix}{key}", str(value.value)
        elif isinstance(value, str | int | float):
            yield f"{prefix}{key}", value

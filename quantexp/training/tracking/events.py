"""What trackers are told, in the same words for all: the run, points of its curves, its end.

A tag is a key of metrics.jsonl in one of two groups: `train/` for what the optimizer sees, `perf/` for what the machine
does. A number that a later version puts into metrics.jsonl is a curve of `train/` without a change here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import Experiment

#: Keys of metrics.jsonl that are no curve: the axes.
_AXES = ("iteration", "tokens", "time")
_PERFORMANCE = ("step_time_s", "tokens_per_s", "tflops", "mfu", "memory_gb")
#: JSON's null for these is a number that was not finite; for others, that there is none.
_NULL_IS_NAN = ("loss", "grad_norm")
#: Tokens of all iterations up to this one: another x axis than the iteration.
TOKENS_SEEN = "train/tokens_seen"
LOSS = "train/loss"

Value = str | int | float | bool


@dataclass(frozen=True)
class TrackedRun:
    """One attempt at a run, as trackers know it."""

    folder: RunDir
    experiment: Experiment
    attempt: int
    #: When the attempt was created, as status.json says.
    created: str

    @property
    def name(self) -> str:
        """The run folder's name and the attempt: the same for whoever looks at the folder."""
        return f"{self.folder.root.name}.{self.attempt}"

    @property
    def id(self) -> str:
        """16 hex digits from name and creation: equal after a restart, another for an equal run elsewhere."""
        return hashlib.sha256(f"{self.name}\n{self.created}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Point:
    """One iteration's values of all curves."""

    iteration: int
    #: Seconds since 1970, UTC.
    time_s: float
    #: Tag -> value; NaN and Inf included.
    scalars: dict[str, float]


class Tracker(Protocol):
    """One tracker's hold on one run. Every method may raise anything that its library raises."""

    #: Its own id of the run, by which a later process finds it again.
    id: str
    #: Where a person finds the run: an address, or a path from the run folder.
    where: str

    def log(self, points: Sequence[Point]) -> None:
        """New points, ascending."""

    def end(self, state: State, reason: str) -> None:
        """How the run ended; nothing comes after."""


def point(line: Mapping[str, Any]) -> Point:
    """A line of metrics.jsonl as a point; `time` is ISO 8601.

    Raises:
        KeyError, TypeError, ValueError: it is no such line.
    """
    iteration = int(line["iteration"])
    scalars = dict(_scalars(line))
    scalars[TOKENS_SEEN] = float(iteration * int(line["tokens"]))
    return Point(iteration, datetime.fromisoformat(line["time"]).timestamp(), scalars)


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        group = "perf" if key in _PERFORMANCE else "train"
        if key in _AXES or (key == "skipped" and line.get("loss_scale") is None):
            continue  # a step is left out only where losses are scaled
        if value is None and key in _NULL_IS_NAN:
            yield f"{group}/{key}", math.nan
        elif isinstance(value, bool | int | float):
            yield f"{group}/{key}", float(value)


def hyperparameters(experiment: Experiment) -> dict[str, Value]:
    """What a run was configured as, by full key, without what is null, empty, or only about this machine."""
    dataset, launcher = experiment.dataset, experiment.launcher
    chosen = {
        "model": asdict(experiment.model),
        "dataset": {"label": dataset.label, "split": dataset.split},
        "quant": asdict(experiment.quant),
        "training": asdict(experiment.training),
        "capture": {"level": experiment.capture.level},
        "launcher": {"num_processes": launcher.num_processes},
    }
    return dict(_flat(chosen, ""))


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

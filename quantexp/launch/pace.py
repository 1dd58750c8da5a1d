"""The pace of a run: latest loss, speed and time left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantexp.launch.progress import time_left_s
from quantexp.runs.metrics import early_end, recent_metrics, speed_of, without_a_step
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status


@dataclass(frozen=True)
class Pace:
    """The last iteration's loss and the run's speed; None if there is no value, or if it is not finite."""

    loss: float | None = None
    tokens_per_s: float | None = None
    #: Seconds until the last iteration ends, at the median step time.
    time_left_s: float | None = None
    #: The words for metrics.jsonl without the last iterations; empty if it has them.
    early_end: str = ""
    #: The words for latest steps that were all left out in fp16; empty if one was taken.
    without_a_step: str = ""


def pace(run: RunDir, status: Status) -> Pace:
    """The pace of a run from its latest iterations; empty if metrics.jsonl has none."""
    latest = recent_metrics(run)
    if not latest:
        return Pace(early_end=early_end(0, status))
    speed, last = speed_of(latest), latest[-1]
    return Pace(
        _number(last.get("loss")),
        speed.tokens_per_s,
        time_left_s(status, speed),
        early_end(last["iteration"], status),
        without_a_step(latest),
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]

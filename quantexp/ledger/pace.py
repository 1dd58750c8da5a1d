"""How fast a run goes, from its latest iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from quantexp.paths import RunDir
from quantexp.progress import recent_metrics
from quantexp.status import Status


@dataclass(frozen=True)
class Pace:
    """The last iteration's numbers; None where there are none, or not finite ones."""

    loss: float | None = None
    tokens_per_s: float | None = None
    #: Until the last iteration, at the median time of the latest ones, seconds.
    time_left_s: float | None = None


def pace(run: RunDir, status: Status) -> Pace:
    """The pace of a run at its latest iterations."""
    latest = recent_metrics(run)
    if not latest:
        return Pace()
    steps = [step for line in latest if (step := _number(line.get("step_time_s"))) is not None]
    left = None
    if steps and status.iterations:
        left = max(0, status.iterations - status.iteration) * median(steps)
    return Pace(_number(latest[-1].get("loss")), _number(latest[-1].get("tokens_per_s")), left)


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]

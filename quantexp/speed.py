"""The speed of a run, one definition for every place that shows it.

    tokens/s    the median of the last WINDOW iterations, without iteration 1

Iteration 1 also sets up, proves the precision map and may capture. The median leaves out what a few captured or saved
iterations took. A line of metrics.jsonl has the value of its own iteration alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

#: Iterations that count, the latest; what is read of a long metrics.jsonl has them.
WINDOW = 100


@dataclass(frozen=True)
class Speed:
    """Medians of the last `WINDOW` iterations, without iteration 1; None where nothing says it."""

    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    #: The largest of the lines that were read, units of 1e9 bytes.
    memory_gb: float | None = None


def speed_of(metrics: Sequence[Mapping[str, Any]]) -> Speed:
    """The speed that lines of metrics.jsonl show, the newest last; of a run of one iteration, that iteration's."""
    lines = [line for line in metrics if isinstance(line.get("iteration"), int)]
    later = [line for line in lines if line["iteration"] > 1][-WINDOW:] or lines
    memory = _numbers(lines, "memory_gb")
    return Speed(
        _median(later, "step_time_s"),
        _median(later, "tokens_per_s"),
        _median(later, "tflops"),
        max(memory) if memory else None,
    )


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    values = [line.get(key) for line in lines]
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _numbers(lines, key)
    return median(values) if values else None

"""The metrics of a run, and its speed, one definition for every place that shows it.

    tokens/s    the median of the last WINDOW iterations, without iteration 1

Iteration 1 also sets up, proves the precision map and may capture. The median leaves out what a few captured or saved
iterations took. A line of metrics.jsonl has the value of its own iteration alone.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from quantexp.runs.paths import RunDir

#: What is read of a long metrics.jsonl; a line has some 300 bytes.
TAIL_BYTES = 1 << 16
#: Iterations that count, the latest; what is read of a long metrics.jsonl has them.
WINDOW = 100


def recent_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The last whole lines of metrics.jsonl, the newest last; what was not finite is NaN."""
    try:
        with run.metrics.open("rb") as stream:
            stream.seek(max(0, run.metrics.stat().st_size - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    recent = []
    for line in lines:  # the first and the last may be cut
        with contextlib.suppress(ValueError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                for name in ("loss", "grad_norm"):
                    metrics[name] = math.nan if metrics.get(name) is None else metrics[name]
                recent.append(metrics)
    return recent


def last_metrics(run: RunDir) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl."""
    return next(reversed(recent_metrics(run)), None)


@dataclass(frozen=True)
class Metrics:
    """One line of metrics.jsonl."""

    iteration: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    tokens_per_s: float
    tflops: float
    memory_gb: float
    #: fp16 only: whether the step was left out because a gradient overflowed; the scale then halves.
    skipped: bool = False
    loss_scale: float | None = None
    #: Models with experts: what balancing them added to the loss, over all layers; `loss` is without it.
    aux_loss: float | None = None
    #: tflops over what all GPUs of the run could do at most, from 0 to 1; None where that is not known.
    mfu: float | None = None
    #: Of held-out samples after the step, the mean over all tokens that count, and e to its power; None without.
    validation_loss: float | None = None
    perplexity: float | None = None


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

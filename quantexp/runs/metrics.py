"""Reads metrics.jsonl, and defines the losses and the speed of a run for every display.

    tokens/s    the median of the last WINDOW iterations, without iteration 1

Iteration 1 also sets up, proves the precision map and may capture. The median ignores the few iterations that captured
or saved. A line of metrics.jsonl has the value of its own iteration.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from quantexp.runs.paths import RunDir

#: Bytes read from the end of metrics.jsonl; a line has some 300 bytes.
TAIL_BYTES = 1 << 16
#: The number of latest iterations that the median covers; TAIL_BYTES hold more lines.
WINDOW = 100


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, newest last; a loss or grad_norm that was not finite is None."""
    return _whole_lines(run)


def recent_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The last whole lines of metrics.jsonl, newest last; a loss or grad_norm that was not finite is NaN."""
    recent = _whole_lines(run, TAIL_BYTES)
    for metrics in recent:
        for name in ("loss", "grad_norm"):
            metrics[name] = math.nan if metrics.get(name) is None else metrics[name]
    return recent


def _whole_lines(run: RunDir, num_bytes: int | None = None) -> list[dict[str, Any]]:
    """The whole lines in the last `num_bytes` of metrics.jsonl, or in all of it; the first and last may be torn."""
    try:
        with run.metrics.open("rb") as stream:
            if num_bytes is not None:
                stream.seek(max(0, run.metrics.stat().st_size - num_bytes))
            texts = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def last_metrics(run: RunDir) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl; None if there is none."""
    return next(reversed(recent_metrics(run)), None)


@dataclass(frozen=True)
class LossCurve:
    """The training loss in nats per token, by ascending iteration."""

    iterations: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    #: Iterations whose loss is NaN or Inf, excluded above.
    nonfinite: tuple[int, ...] = ()


def loss_curve(metrics: Iterable[Mapping[str, Any]]) -> LossCurve:
    """The losses of `read_metrics`; the last one of an iteration that was repeated after a resume.

    Lines without iteration or loss are left out.
    """
    losses: dict[int, float] = {}
    for line in metrics:
        iteration, loss = line.get("iteration"), line.get("loss")
        if isinstance(iteration, int) and "loss" in line and loss is None:
            losses[iteration] = math.nan  # how a loss that is not finite is written
        elif isinstance(iteration, int) and isinstance(loss, int | float):
            losses[iteration] = float(loss)
    finite = {i: losses[i] for i in sorted(losses) if math.isfinite(losses[i])}
    nonfinite = tuple(i for i in sorted(losses) if i not in finite)
    return LossCurve(tuple(finite), tuple(finite.values()), nonfinite)


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
    """Medians of the last `WINDOW` iterations, without iteration 1; None if no line has the value."""

    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    #: The largest value of all lines read, in units of 1e9 bytes.
    memory_gb: float | None = None


def speed_of(metrics: Sequence[Mapping[str, Any]]) -> Speed:
    """The speed from lines of metrics.jsonl, newest last; a run of one iteration has the speed of that iteration."""
    lines = [line for line in metrics if isinstance(line.get("iteration"), int)]
    window = [line for line in lines if line["iteration"] > 1][-WINDOW:] or lines
    memory = _numbers(lines, "memory_gb")
    return Speed(
        _median(window, "step_time_s"),
        _median(window, "tokens_per_s"),
        _median(window, "tflops"),
        max(memory) if memory else None,
    )


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    values = [line.get(key) for line in lines]
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _numbers(lines, key)
    return median(values) if values else None

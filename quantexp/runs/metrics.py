"""Reads metrics.jsonl, and defines the losses and the speed of a run for every display.

    tokens/s    the median of the last WINDOW iterations, without iteration 1

Iteration 1 also sets up, proves the precision map and may capture. The median ignores the few iterations that captured
or saved. A line of metrics.jsonl has the value of its own iteration.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Required, TypedDict

from quantexp.errors import UnreadableError
from quantexp.reading.files import open_file
from quantexp.reading.json_files import json_lines, json_of, lines_from, value_of
from quantexp.reading.typed import Count, typed
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status

#: Bytes read from the end of metrics.jsonl, and for its last line alone; a line has some 450 bytes.
TAIL_BYTES, LINE_BYTES = 1 << 16, 1 << 12
#: The number of latest iterations that the median covers; TAIL_BYTES hold more lines.
WINDOW = 100

#: Measures of every iteration. None, JSON's null, is a number of theirs that was not finite; of others it is no number.
ALWAYS_MEASURED = ("loss", "grad_norm")

#: The smallest fp16 loss scale.
MIN_LOSS_SCALE = 1.0


class MetricsLine(TypedDict, total=False):
    """A line of metrics.jsonl as any version may have written it; a value that was not finite is None."""

    iteration: Required[Count]
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens: Count | None
    step_time_s: float | None
    tokens_per_s: float | None
    tflops: float | None
    memory_gb: float | None
    skipped: bool
    loss_scale: float | None
    aux_loss: float | None
    mfu: float | None
    validation_loss: float | None
    perplexity: float | None
    unquantised_loss: float | None
    switched: list[Count] | None
    time: str


#: Where a line of `Metrics` begins.
_ITERATION = re.compile(rb'\{"iteration": (\d+),')


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, newest last; a loss or grad_norm that was not finite is None.

    The last line may be unfinished, and is then left out.

    Raises:
        UnreadableError: names the first wrong line.
    """
    return [dict(line) for line in json_lines(run.metrics, MetricsLine, _refuse)]


def finite(line: dict[str, Any]) -> dict[str, Any]:
    """The line with null for non-finite values: JSON has neither NaN nor Infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }


def lines_before(run: RunDir, iteration: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of iterations before this one, the last of each that was repeated, in order.

    Raises:
        UnreadableError: names the first wrong line.
    """
    lines = {line["iteration"]: line for line in read_metrics(run)}
    return [lines[each] for each in sorted(lines) if each < iteration]


@dataclass(frozen=True)
class Latest:
    """The end of metrics.jsonl."""

    #: The last whole line; None if there is none. A loss or grad_norm that was not finite is NaN.
    line: dict[str, Any] | None
    speed: Speed
    without_a_step: str = ""


def latest(run: RunDir, measures: Sequence[str] = ("step_time_s", "tokens_per_s")) -> Latest:
    """The end of metrics.jsonl, with these measures of the speed.

    The last line is parsed. Of the lines before it only the measures are, unless an iteration has no line or several.

    Raises:
        UnreadableError: names a wrong line among those that are parsed.
    """
    tail = _tail(run, TAIL_BYTES if measures else LINE_BYTES)
    line = _last_line(tail)
    if line is not None and not (measures and line.get("skipped")):
        medians = {name: _quick_median(tail, line["iteration"], name) for name in measures}
        if None not in medians.values():
            return Latest(line, Speed(**medians))
    lines = _recent(run)
    return Latest(lines[-1] if lines else None, speed_of(lines), without_a_step(lines))


def last_metrics(run: RunDir) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl; None if there is none. Lines before it are not looked at."""
    return latest(run, ()).line


def _tail(run: RunDir, num_bytes: int) -> bytes:
    """The lines that begin in the last bytes of metrics.jsonl; empty without the file."""
    try:
        stream = open_file(run.metrics)
    except FileNotFoundError:
        return b""
    with stream:
        start = max(0, stream.seek(0, os.SEEK_END) - num_bytes)
        stream.seek(start)
        tail = stream.read(num_bytes)
    return tail[tail.find(b"\n") + 1 :] if start else tail


def _last_line(tail: bytes) -> dict[str, Any] | None:
    """The last line if it is ended and right, else None."""
    try:
        line = typed(json_of(tail[tail.rfind(b"\n", 0, -1) + 1 :]), MetricsLine)
    except ValueError:
        return None
    return _with_nan(line) if tail.endswith(b"\n") else None


def _quick_median(tail: bytes, last: int, measure: str) -> float | None:
    """The median as `speed_of` takes it; None unless each iteration up to the last one has one line with one value."""
    before, *after = tail.rsplit(b'"%b": ' % measure.encode(), WINDOW)
    first = _ITERATION.match(before, before.rfind(b"\n") + 1)
    lines = 1 + tail.count(b'}\n{"iteration": ', len(before))
    if first is None or not len(after) == lines == last - int(first[1]) + 1:
        return None
    try:
        values = json_of(b"[%b]" % b",".join(text.partition(b",")[0] for text in after))
    except ValueError:
        return None
    window = values[max(0, 2 - int(first[1])) :] or values
    return float(median(window)) if {*map(type, values)} <= {int, float} else None


def _recent(run: RunDir) -> list[dict[str, Any]]:
    """The last lines of metrics.jsonl, newest last; all if one of them is wrong, to count from the first."""
    wrong: list[UnreadableError] = []
    lines = lines_from(io.BytesIO(_tail(run, TAIL_BYTES)), run.metrics, wrong.append)
    values = [value_of(line, run.metrics, MetricsLine, wrong.append) for line in lines]
    recent = [dict(value) for value in values if value is not None and not wrong]
    return list(map(_with_nan, recent or read_metrics(run)))


def _with_nan(line: Mapping[str, Any]) -> dict[str, Any]:
    missing = {name: math.nan for name in ALWAYS_MEASURED if line.get(name) is None}
    return {**line, **missing}


def _refuse(error: UnreadableError) -> None:
    raise error


def early_end(last: int, status: Status | None) -> str:
    """`metrics.jsonl ends at iteration 5 of 8` if its last line is of an earlier iteration than status.json's; else "".

    A run writes the line before its status, so a reader takes the status first.
    """
    if status is None or last >= status.iteration:
        return ""
    return f"metrics.jsonl ends at iteration {last} of {status.iteration}"


@dataclass(frozen=True)
class LossCurve:
    """The training loss in nats per token, or another measure, by ascending iteration."""

    iterations: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    #: Iterations whose value is NaN or Inf, excluded above.
    nonfinite: tuple[int, ...] = ()
    #: Iterations with several values, of which the last is taken.
    repeated: tuple[int, ...] = ()


def loss_curve(metrics: Iterable[Mapping[str, Any]], measure: str = "loss") -> LossCurve:
    """The losses of `read_metrics`, or another of its keys; the last one of an iteration that was repeated.

    Lines without iteration or value are left out.
    """
    losses: dict[int, float] = {}
    repeated: set[int] = set()
    is_always_measured = measure in ALWAYS_MEASURED
    for line in metrics:
        iteration, loss = line.get("iteration"), line.get(measure)
        if loss is None and is_always_measured and measure in line:
            loss = math.nan
        if isinstance(iteration, int) and isinstance(loss, int | float):
            if iteration in losses:
                repeated.add(iteration)
            losses[iteration] = float(loss)
    finite = {i: losses[i] for i in sorted(losses) if math.isfinite(losses[i])}
    nonfinite = tuple(i for i in sorted(losses) if i not in finite)
    return LossCurve(tuple(finite), tuple(finite.values()), nonfinite, tuple(sorted(repeated)))


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
    #: Whether the step was left out because its loss or gradient was not finite. In fp16 the scale then falls.
    skipped: bool = False
    #: What was not finite first, if the step was left out.
    nonfinite: str | None = None
    loss_scale: float | None = None
    #: Models with experts: what balancing them added to the loss, over all layers; `loss` is without it.
    aux_loss: float | None = None
    #: tflops over what all GPUs of the run could do at most, from 0 to 1; None where that is not known.
    mfu: float | None = None
    #: Of held-out samples after the step, the mean over all tokens that count, and e to its power; None without.
    validation_loss: float | None = None
    perplexity: float | None = None
    #: The validation loss with no slot quantised.
    unquantised_loss: float | None = None
    #: The indices of the scheme's rules whose conditions this iteration met; they are in force from the next one on.
    switched: list[int] | None = None


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
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _numbers(lines, key)
    return median(values) if values else None


def lowers_scale(scale: float | None, loss: float) -> bool:
    """Whether a step was left out in the search for fp16's loss scale, which is above its minimum."""
    return scale is not None and scale > MIN_LOSS_SCALE and math.isfinite(loss)


def without_a_step(latest: Sequence[Mapping[str, Any]]) -> str:
    """What to say if each of the latest steps was left out in that search, so that no weight changed; else ""."""
    if not latest or not all(line.get("skipped") and not is_fault(line) for line in latest):
        return ""
    which = "the only step" if len(latest) == 1 else f"all of the last {len(latest)} steps"
    scale = latest[-1]["loss_scale"]
    return f"{which} left out: gradients overflow fp16 at a loss scale of {scale:.4g} (training.initial_loss_scale)"


def is_fault(line: Mapping[str, Any]) -> bool:
    """Whether the step of a line of metrics.jsonl was left out, and not in that search."""
    loss = line.get("loss")
    return bool(line.get("skipped")) and not lowers_scale(
        line.get("loss_scale"), math.nan if loss is None else loss
    )

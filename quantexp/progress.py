"""What a person sees while a run works: one live line, read from the run folder alone."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from quantexp.errors import RunError
from quantexp.paths import RunDir
from quantexp.speed import Speed, speed_of
from quantexp.status import Status, read_status

#: What is read of a long metrics.jsonl; a line has some 300 bytes.
TAIL_BYTES = 1 << 16
#: Columns from which the live line has room for every name.
WIDE = 120


def recent_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The last whole lines of metrics.jsonl, the newest last; what was not finite is NaN."""
    try:
        with run.metrics.open("rb") as stream:
            stream.seek(max(0, run.metrics.stat().st_size - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:  # the first and the last may be cut
        with contextlib.suppress(ValueError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                for name in ("loss", "grad_norm"):
                    metrics[name] = math.nan if metrics.get(name) is None else metrics[name]
                found.append(metrics)
    return found


def last_metrics(run: RunDir) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl."""
    return next(reversed(recent_metrics(run)), None)


@contextlib.contextmanager
def live_line(run: RunDir, names: list[str], console: Console) -> Iterator[Callable[[], None]]:
    """A progress line for a run; yields the function that brings it up to date.

    `names` are model, dataset and scheme; a narrow terminal shows the scheme alone.
    """
    name = " ".join(names) if console.width >= WIDE else names[-1]
    lines = Progress(
        *wide_columns(), console=console, transient=True, disable=not console.is_terminal
    )
    with lines:
        task = add_line(lines, name)
        yield lambda: update_line(lines, task, run)


def wide_columns() -> list[ProgressColumn]:
    """A line with everything in it."""
    return [
        SpinnerColumn(),
        TextColumn("{task.fields[name]}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=8),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
        TextColumn(
            "[cyan]{task.fields[doing]}", table_column=Column(no_wrap=True, overflow="ellipsis")
        ),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
    ]


def narrow_columns(width: int, longest_name: int) -> list[ProgressColumn]:
    """Lines of several runs on a narrow terminal: while a run trains its numbers, else what it does.

    The widths are fixed, so that no line makes another one shrink: of `width` columns the counter takes 11, the time 7,
    what a run does at most 32, gaps and spinner the rest.
    """
    room = max(12, width - (11 + 7 + 32 + 6))
    name = Column(no_wrap=True, overflow="ellipsis", width=min(longest_name, room))
    brief = Column(no_wrap=True, overflow="ellipsis", width=32)
    return [
        SpinnerColumn(),
        TextColumn("{task.fields[name]}", markup=False, table_column=name),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("[cyan]{task.fields[brief]}", table_column=brief),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
    ]


def add_line(lines: Progress, name: str) -> TaskID:
    """A line for a run that starts now."""
    start = "starting"
    return lines.add_task("", total=None, name=name, numbers="", doing=start, brief=start)


def update_line(lines: Progress, task: TaskID, run: RunDir) -> None:
    """Bring a run's line up to date with its folder."""
    with contextlib.suppress(RunError):  # the file is replaced by other versions of us too
        status = read_status(run.status)
        if status is not None:
            numbers, doing = _numbers(recent_metrics(run)), _doing(status)
            lines.update(
                task,
                total=status.iterations or None,
                completed=status.iteration,
                numbers=numbers,
                doing=doing,
                brief=numbers if numbers and status.phase == "training" else doing or "ending",
            )


def _numbers(metrics: list[dict[str, Any]]) -> str:
    if not metrics:
        return ""
    return f"loss {metrics[-1]['loss']:.4f}  {tokens_words(speed_of(metrics))}"


def tokens_words(speed: Speed) -> str:
    """`1,234 tokens/s`; `-` where nothing says it."""
    return "-" if speed.tokens_per_s is None else f"{speed.tokens_per_s:,.0f} tokens/s"


def _doing(status: Status) -> str:
    captured = status.capture
    if captured.get("stopped"):
        return captured_words(captured)
    if status.phase == "capturing":
        return f"capturing {captured['current']}"
    if captured and status.phase == "training":
        return captured_words(captured)
    return status.phase


def captured_words(captured: Mapping[str, Any]) -> str:
    """What has been captured, what waits to be written and how fast that goes; empty where nothing is captured."""
    if captured.get("stopped"):
        return "capture stopped"
    if not captured:
        return ""
    told = f"{captured['tensors']} tensors, {human_bytes(captured['num_bytes'])}"
    if not captured.get("queue_bytes"):
        return told
    rate = human_bytes(captured["bytes_per_s"])
    return f"{told}, {human_bytes(captured['queue_bytes'])} wait, {rate}/s"


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

"""What a person sees while a run works: one live line, read from the run folder alone."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from quantexp.errors import RunError
from quantexp.paths import RunDir
from quantexp.status import Status, read_status

#: What is read of a long metrics.jsonl; a line has some 300 bytes.
TAIL_BYTES = 1 << 14
#: Columns from which the live line has room for every name.
WIDE = 120


def last_metrics(run: RunDir) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl."""
    try:
        with run.metrics.open("rb") as stream:
            stream.seek(max(0, run.metrics.stat().st_size - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            metrics: dict[str, Any] = json.loads(line)
            for name in ("loss", "grad_norm"):  # null where it was not finite
                metrics[name] = math.nan if metrics.get(name) is None else metrics[name]
            return metrics
    return None


@contextlib.contextmanager
def live_line(run: RunDir, names: list[str], console: Console) -> Iterator[Callable[[], None]]:
    """A progress line for a run; yields the function that brings it up to date.

    `names` are model, dataset and scheme; a narrow terminal shows the scheme alone.
    """
    name = " ".join(names) if console.width >= WIDE else names[-1]
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[name]}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=8),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
        TextColumn(
            "[cyan]{task.fields[doing]}", table_column=Column(no_wrap=True, overflow="ellipsis")
        ),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=None, name=name, numbers="", doing="starting")

        def update() -> None:
            with contextlib.suppress(RunError):  # the file is replaced by other versions of us too
                status = read_status(run.status)
                if status is not None:
                    progress.update(
                        task,
                        total=status.iterations or None,
                        completed=status.iteration,
                        numbers=_numbers(last_metrics(run)),
                        doing=_doing(status),
                    )

        yield update


def _numbers(metrics: dict[str, Any] | None) -> str:
    if metrics is None:
        return ""
    return f"loss {metrics['loss']:.4f}  {metrics['tokens_per_s']:,.0f} tokens/s"


def _doing(status: Status) -> str:
    captured = status.capture
    if status.phase == "capturing":
        return f"capturing {captured['current']}"
    if captured and status.phase == "training":
        return f"{captured['tensors']} tensors, {human_bytes(captured['num_bytes'])}"
    return status.phase


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

"""The rows of `quantexp list runs`, and their table.

The statuses of all runs are read first, because the newest run comes first. The metrics, the slowest part, are read
when a row is printed, so the table of any number of runs begins soon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, overload

from rich.console import Console
from rich.text import Text

from quantexp.errors import UnreadableError
from quantexp.model.label import short_model_label
from quantexp.runs.find import runs_below
from quantexp.runs.metrics import last_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import model_section, model_text
from quantexp.runs.status import NEVER_STARTED, UNREADABLE, read_status
from quantexp.terminal.console import plain
from quantexp.terminal.fitted_table import Column, Row, Shrink, layout_of, wrapped

_REASON = "reason"
_RUNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("state", min_width=len(UNREADABLE)),
    Column("iteration", is_number=True),
    Column("loss", is_number=True, min_width=len("000.0000")),
    Column(_REASON, worth=2, shrink=Shrink.WRAP, min_width=40),
    Column("model", worth=1),
)
#: Rows that are printed together.
_TOGETHER = 200


class Rows(Sequence[dict[str, Any]]):
    """A row for each run; its loss is read when the row is taken."""

    def __init__(self, runs: Sequence[tuple[RunDir, dict[str, Any]]]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            return Rows(self._runs[index])
        run, row = self._runs[index]
        if row["state"] == UNREADABLE:
            return row
        try:
            metrics = last_metrics(run)
        except UnreadableError as error:
            return _unreadable(run, run.without_folder(error), row)
        is_finite = metrics is not None and math.isfinite(metrics["loss"])
        return {**row, "loss": metrics["loss"] if metrics and is_finite else None}

    def without_losses(self) -> list[dict[str, Any]]:
        """The rows as far as they are known without reading a file."""
        return [row for _, row in self._runs]


def run_rows(root: Path) -> Rows:
    """Every run below the root, newest first; those whose age cannot be read are last."""
    labels: dict[str, str] = {}
    rows = [(run, _row(run, labels)) for run in runs_below(root)]
    return Rows(sorted(rows, key=lambda each: str(each[1]["created"] or ""), reverse=True))


def _row(run: RunDir, labels: dict[str, str]) -> dict[str, Any]:
    """The row of one run without its loss.

    `labels` gathers the labels of models by their text, which most runs have in common.
    """
    try:
        status = read_status(run.status)
    except UnreadableError as error:
        return _unreadable(run, run.without_folder(error))
    if status is None:
        return _unreadable(run, NEVER_STARTED)
    row = {
        "run": run.root.name,
        "state": status.state.value,
        "iteration": status.iteration,
        "iterations": status.iterations,
        "loss": None,
        "created": status.created,
        "reason": status.reason,
        "model": None,
    }
    try:
        if (text := model_text(run)) not in labels:
            labels[text] = short_model_label(model_section(text, run))
    except UnreadableError as error:
        return _unreadable(run, run.without_folder(error), row)
    return {**row, "model": labels[text]}


def _unreadable(run: RunDir, reason: str, row: dict[str, Any] | None = None) -> dict[str, Any]:
    """The row of a damaged run, with what else of it could be read."""
    nulls = dict.fromkeys(("iteration", "iterations", "loss", "created", "model"))
    return {"run": run.root.name, **(row or nulls), "state": UNREADABLE, "reason": reason}


def print_runs(rows: Rows, console: Console) -> None:
    """Print a line for each run; a reason that does not fit beside it stands below the table."""
    outline = zip(*map(_words, rows.without_losses()), strict=True)
    distinct = zip_longest(*map(dict.fromkeys, outline), fillvalue="")
    layout = layout_of(_RUNS, list(map(_cells, distinct)), console.width)
    below = []
    for first in range(0, len(rows), _TOGETHER):
        part = list(rows[first : first + _TOGETHER])
        cells = [_cells(_words(row)) for row in part]
        title = None if first else "runs"
        console.print(layout.table(cells, title, has_headings=not first))
        if _REASON not in layout.shown:
            below += [row for row in part if row["reason"]]
    for row in below:
        line = plain(f"{row['run']}: {row['reason']}")
        console.print(Text("\n").join(wrapped(line, console.width)), soft_wrap=True)


def _words(row: dict[str, Any]) -> tuple[str, ...]:
    loss = row["loss"]
    return (
        row["run"],
        row["state"],
        "-" if row["iterations"] is None else f"{row['iteration']}/{row['iterations']}",
        "-" if loss is None else f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.3g}",
        row["reason"],
        row["model"] or "",
    )


def _cells(words: Sequence[str]) -> Row:
    run, state, iteration, loss, reason, model = words
    return [plain(run), state, iteration, loss, plain(reason), plain(model)]

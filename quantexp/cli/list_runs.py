"""The rows of `quantexp list runs`, and their table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from quantexp.errors import UnreadableError
from quantexp.model.label import short_model_label
from quantexp.runs.find import runs_below
from quantexp.runs.metrics import last_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import read_config
from quantexp.runs.status import UNREADABLE, read_status
from quantexp.terminal.console import plain
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

_REASON = "reason"
_RUNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("state"),
    Column("iteration", is_number=True),
    Column("loss", is_number=True),
    Column(_REASON, worth=2, shrink=Shrink.WRAP, min_width=40),
    Column("model", worth=1),
)


def run_rows(root: Path) -> list[dict[str, object]]:
    """Every run below the root, newest first."""
    rows: list[dict[str, object]] = []
    for run in runs_below(root):
        try:
            if (row := _run_row(run)) is not None:
                rows.append(row)
        except UnreadableError as error:
            nulls = dict.fromkeys(("iteration", "iterations", "loss", "created", "model"))
            why = str(error).replace(f"{run.root}/", "")
            rows.append({"run": run.root.name, "state": UNREADABLE, **nulls, "reason": why})
    return sorted(rows, key=lambda row: str(row["created"] or ""), reverse=True)


def _run_row(run: RunDir) -> dict[str, object] | None:
    """The row of one run; None for a folder without a status.

    Raises:
        UnreadableError: a file of the run is damaged.
    """
    status = read_status(run.status)
    if status is None:
        return None
    metrics, config = last_metrics(run), read_config(run)
    return {
        "run": run.root.name,
        "state": status.state.value,
        "iteration": status.iteration,
        "iterations": status.iterations,
        "loss": metrics["loss"] if metrics and math.isfinite(metrics["loss"]) else None,
        "created": status.created,
        "reason": status.reason,
        "model": short_model_label(config.get("model") or {}),
    }


def print_runs(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a line for each run; a reason that does not fit beside it stands below the table."""
    cells: list[list[str | Text]] = [
        [
            plain(row["run"]),
            row["state"],
            "-" if row["iterations"] is None else f"{row['iteration']}/{row['iterations']}",
            "-" if row["loss"] is None else f"{row['loss']:.4f}",
            plain(row["reason"]),
            plain(row["model"] or ""),
        ]
        for row in rows
    ]
    fitted = fitted_table(_RUNS, cells, console.width, "runs")
    console.print(fitted.table)
    if _REASON in fitted.left_out:
        for row in rows:
            if row["reason"]:
                console.print(f"{escape(row['run'])}: {escape(row['reason'])}")

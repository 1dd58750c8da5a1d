"""Prints the result of a submission: job ids, folders, and the commands to follow and stop it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp.folders import for_shell, short_path
from quantexp.runs.paths import Submission
from quantexp.terminal.facts import Facts
from quantexp_launchers.slurm.batch import Array, Sent

#: Maximum runs that are listed one by one.
FEW = 12


def print_submitted(sent: list[Sent], arrays: list[Array], console: Console, scope: Path) -> None:
    """Print submitted and skipped runs and the next commands; `scope` stands for all of them on the command line."""
    table = Facts(console)
    for array in arrays:
        table.add_row("submitted", _array(array))
    submitted = [point for point in sent if point.job_id is not None]
    for point in submitted[:FEW]:
        table.add_path(f"job {point.job_id}", point.run.root)
    if len(submitted) > FEW:
        table.add_row("", f"and {len(submitted) - FEW} more")
    for point in sent:
        if point.job_id is None:
            table.add_row("not sent", escape(f"{short_path(point.run.root)}: {point.reason}"))
    if arrays:
        if not any(array.batch.launcher.gpus_per_node for array in arrays):
            table.add_row("", "[yellow]no GPU requested (launcher.gpus_per_node=0): CPU cores[/]")
        for array in arrays:
            table.add_path("script", Submission(array.batch.folder).script)
    where = for_shell(scope)
    table.add_line("follow", f"quantexp status {where} --watch")
    if submitted:
        run = for_shell(submitted[0].run.root)
        table.add_line("", f"quantexp logs {run} -f")
        table.add_line("stop", f"quantexp cancel {where}")
    table.print()


def _array(array: Array) -> str:
    batch, first = array.batch, array.job_ids[0].split("_")[0]
    alone = len(batch.runs) == 1
    words = f"job {first}" if alone else f"{len(batch.runs)} runs as the array {first}"
    if batch.throttle is not None and len(batch.runs) > batch.throttle:
        words += f", at most {batch.throttle} at a time"
    if batch.dependency is not None:
        words += f", after {batch.dependency}"
    return words

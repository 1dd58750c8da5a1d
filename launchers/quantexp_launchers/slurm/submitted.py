"""What a person sees after a submission: ids, folder, and the commands to follow and to stop."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp.folders import short_path
from quantexp.terminal.facts import Facts
from quantexp_launchers.slurm.batch import Array, Sent

#: Runs that are named one by one; of more, the array stands for them.
FEW = 12


def print_submitted(sent: list[Sent], arrays: list[Array], console: Console, scope: Path) -> None:
    """What was sent, what was not and why, and what to type next; `scope` names all of it on the command line."""
    table = Facts(console)
    for array in arrays:
        table.add_row("submitted", _array(array))
    named = [one for one in sent if one.job_id is not None]
    for one in named[:FEW]:
        table.add_path(f"job {one.job_id}", one.run.root)
    if len(named) > FEW:
        table.add_row("", f"and {len(named) - FEW} more")
    for one in sent:
        if one.job_id is None:
            table.add_row("not sent", escape(f"{short_path(one.run.root)}: {one.reason}"))
    if arrays:
        if not any(array.batch.launcher.gpus_per_node for array in arrays):
            table.add_row(
                "", "[yellow]no GPU was asked for (launcher.gpus_per_node=0): CPU cores[/]"
            )
        for array in arrays:
            table.add_path("script", _script(array))
    where = shlex.quote(str(short_path(scope)))
    table.add_line("follow", f"quantexp status {where} --watch")
    if named:
        run = shlex.quote(str(short_path(named[0].run.root)))
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


def _script(array: Array) -> Path:
    return array.batch.folder / f"{array.job_ids[0].split('_')[0]}_submission.sh"

"""Runs of this machine that wait for their turn in a sweep that somebody works through.

Such a run is prepared and nothing more: no process has its folder yet. Its sweep's list names it, and the sweep's lock
is held for as long as the process that will start it lives.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from quantexp.errors import RunError
from quantexp.runs.lock import is_held
from quantexp.runs.paths import RunsRoot, SweepFiles
from quantexp.runs.status import State, read_json


def waiting_in(root: Path) -> dict[str, str]:
    """Names of the runs that such a sweep has not ended yet, and the sweep's name."""
    found = {}
    for file in sorted(RunsRoot(root).sweeps.glob("*.json")):
        if is_held(SweepFiles(file).lock):
            with contextlib.suppress(RunError, KeyError, TypeError):  # another version's
                for row in read_json(file)["runs"]:
                    if row["run"] is not None and row["state"] in (State.PENDING, State.RUNNING):
                        found[row["run"]] = file.stem
    return found

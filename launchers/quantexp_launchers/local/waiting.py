"""Finds pending runs of sweeps that a live process on this machine executes.

Such a run is only prepared: no process holds its lock yet. The sweep's list names it, and the process that will start
it holds the sweep's lock.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from quantexp.errors import RunError
from quantexp.runs.lock import is_held
from quantexp.runs.paths import RunsRoot, SweepFiles
from quantexp.runs.status import State, read_json


def waiting_in(root: Path) -> dict[str, str]:
    """Run name -> sweep name, for the unfinished runs of live sweeps."""
    sweeps = {}
    for file in sorted(RunsRoot(root).sweeps.glob("*.json")):
        if is_held(SweepFiles(file).lock):
            with contextlib.suppress(RunError, KeyError, TypeError):  # written by another version
                for row in read_json(file)["runs"]:
                    if row["run"] is not None and row["state"] in (State.PENDING, State.RUNNING):
                        sweeps[row["run"]] = file.stem
    return sweeps

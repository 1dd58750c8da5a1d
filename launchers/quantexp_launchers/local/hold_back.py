"""Records in a prepared run's folder why the run is not started."""

from __future__ import annotations

import contextlib
import os

from quantexp.errors import RunError
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status


def hold_back(run: RunDir, reason: str) -> None:
    """Write the reason to a pending run's status; a run that has started, or that is locked, stays unchanged."""
    with contextlib.suppress(RunError):  # another process holds it, or its folder is gone
        lock = take_lock(run, patience_s=0)
        try:
            status = read_status(run.status)
            if status is not None and status.state is State.PENDING and status.started is None:
                status.reason = reason
                write_status(run.status, status)
        finally:
            os.close(lock)

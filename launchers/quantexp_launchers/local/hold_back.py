"""Says in the folder of a run that was prepared and will not be started now why that is."""

from __future__ import annotations

import contextlib
import os

from quantexp.errors import RunError
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status


def hold_back(run: RunDir, reason: str) -> None:
    """Give a run that waits its reason; one that another process has, or that has started, is left alone."""
    with contextlib.suppress(RunError):  # somebody else has it, or it is gone: nothing to say of it
        lock = take_lock(run, patience_s=0)
        try:
            status = read_status(run.status)
            if status is not None and status.state is State.PENDING and status.started is None:
                status.reason = reason
                write_status(run.status, status)
        finally:
            os.close(lock)

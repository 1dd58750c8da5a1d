"""Records in status.json the end of a run that could not record it, so that it agrees with the scheduler."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from quantexp.errors import RunError
from quantexp.launch.backend import Standing
from quantexp.runs.claim import drop_dead_claim
from quantexp.runs.lock import locked
from quantexp.runs.status import State, finish, read_status, write_status

#: The reason in a cancelled run's status.
CANCELLED = "cancelled by quantexp cancel"


def mark_cancelled(standing: Standing, reason: str = CANCELLED) -> Standing:
    """Record a run as cancelled, unless another process holds its lock; returns the new standing."""
    return settle(replace(standing, state=State.CANCELLED, alive=False, reason=reason, sure=True))


def settle(standing: Standing) -> Standing:
    """Write the standing to status.json if the run has ended and its status differs; returns the new standing.

    Nothing is written while another process holds the lock, if the folder is read-only, or if the status has changed
    since it was read; a later call writes it then.
    """
    if not standing.is_unrecorded_end:
        return standing
    assert standing.state is not None
    with contextlib.suppress(RunError, OSError):
        return _record(standing, standing.state)
    return standing


def _record(standing: Standing, state: State) -> Standing:
    run = standing.run
    with locked(run, patience_s=0):
        status = read_status(run.status)
        if status != standing.status:
            return standing
        ended = standing.job.ended if standing.job is not None else None
        status = replace(standing.status, capture=dict(standing.status.capture))
        finish(status, state, standing.reason)
        if ended is not None:
            status.finished = ended.isoformat(timespec="milliseconds")
        if standing.job is not None:
            status.job_id = standing.job.id
        run.reserve.unlink(missing_ok=True)
        drop_dead_claim(run)
        write_status(run.status, status)
    return replace(standing, status=status)

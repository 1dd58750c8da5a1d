"""Writes into status.json how a run ended that could not say so, so that folder, exit codes and accounting agree."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from quantexp.errors import RunError
from quantexp.launch.ledger.standing import Standing
from quantexp.runs.lock import take_lock
from quantexp.runs.status import State, finish, read_status, write_status


def settle(found: Standing) -> Standing:
    """The standing, written down if it has ended and status.json says something else.

    Nothing is written while another process has the folder, where it cannot be written, or where the run has said
    something since; the next one who looks writes it then.
    """
    if not found.is_news:
        return found
    assert found.state is not None
    with contextlib.suppress(RunError, OSError):
        return _written(found, found.state)
    return found


def _written(found: Standing, state: State) -> Standing:
    run = found.run
    lock = take_lock(run, patience_s=0)
    try:
        status = read_status(run.status)
        if status != found.status:
            return found
        ended = found.job.ended if found.job is not None else None
        status = replace(found.status, capture=dict(found.status.capture))
        finish(status, state, found.reason)
        if ended is not None:
            status.finished = ended.isoformat(timespec="milliseconds")
        if found.job is not None:
            status.job_id = found.job.id
        run.reserve.unlink(missing_ok=True)
        write_status(run.status, status)
    finally:
        os.close(lock)
    return replace(found, status=status)

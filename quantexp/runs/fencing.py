"""A fencing token: the newest start of a job is the only one that may write into a run's folder.

The scheduler may requeue a job while its earlier start still runs, because it cannot end processes on a node that it
has lost. Each start therefore writes its name into the folder. A process that reads the name of another start there
exits without writing anything. This works even on disks whose locks do not reach from node to node.
"""

from __future__ import annotations

import os

from quantexp.runs.paths import RunDir
from quantexp.runs.status import write_whole


class TakenOverError(BaseException):
    """This process belongs to a start that is no longer the newest; a BaseException, so that no handler catches it."""


def own_start() -> str:
    """The name of this process's start: the job's id and its restart count."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{job} {os.environ.get('SLURM_RESTART_COUNT', '0')}\n"


def take_over(run: RunDir) -> None:
    """Make this process's start the only one that may write."""
    write_whole(run.start, own_start())


def is_ours(run: RunDir) -> bool:
    """Whether this process's start may write."""
    try:
        return run.start.read_text() == own_start()
    except OSError:
        return False


def require_ours(run: RunDir) -> None:
    """Stop this process if another start has taken over the run.

    Raises:
        TakenOverError: another start may write, this one may not.
    """
    if not is_ours(run):
        raise TakenOverError

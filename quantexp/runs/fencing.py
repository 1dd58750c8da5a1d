"""Which start of which job may write into a run's folder.

The scheduler may start a job again while an earlier start of it still runs: on a node that it has lost, it can end
nothing. So each start writes its name into the folder, and what runs there on behalf of another one ends when it sees
that, without a word. This holds even on disks whose locks do not reach from node to node.
"""

from __future__ import annotations

import os

from quantexp.runs.paths import RunDir
from quantexp.runs.status import write_whole


class TakenOverError(BaseException):
    """This process writes for a start that is no longer the newest; nothing that catches errors may catch it."""


def own_start() -> str:
    """The name of the start that this process belongs to: its job, and how often that was started before."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{job} {os.environ.get('SLURM_RESTART_COUNT', '0')}\n"


def take_over(run: RunDir) -> None:
    """Make this process's start the one that may write."""
    write_whole(run.start, own_start())


def is_ours(run: RunDir) -> bool:
    """Whether this process's start may write."""
    try:
        return run.start.read_text() == own_start()
    except OSError:
        return False


def require_ours(run: RunDir) -> None:
    """End this process's part in the run where another start has taken over.

    Raises:
        TakenOverError: it has.
    """
    if not is_ours(run):
        raise TakenOverError

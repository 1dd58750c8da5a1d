"""A fencing token: the newest start of a job is the only one that may write into a run's folder.

The scheduler may requeue a job while its earlier start still runs, because it cannot end processes on a node that it
has lost. Each start therefore writes its name into the folder. A process that reads the name of another start there
exits without writing anything. This works even on disks whose locks do not reach from node to node.
"""

from __future__ import annotations

import os

from quantexp.runs.paths import RunDir
from quantexp.runs.status import write_whole

#: The variable in which a job's launcher names each of its starts, such as the job's id and its restart count.
START = "QUANTEXP_START"


class TakenOverError(BaseException):
    """This process belongs to a start that is no longer the newest; a BaseException, so that no handler catches it."""


def own_start() -> str:
    """The name of this process's start; empty if its launcher gives it none."""
    return os.environ.get(START, "")


def take_over(run: RunDir) -> None:
    """Make this process's start the only one that may write."""
    write_whole(run.start, own_start())


def is_ours(run: RunDir) -> bool:
    """Whether this process's start may write; any may if its launcher does not name the starts."""
    start = own_start()
    try:
        return not start or run.start.read_text() == start
    except OSError:
        return False


def require_ours(run: RunDir) -> None:
    """Stop this process if another start has taken over the run.

    Raises:
        TakenOverError: another start may write, this one may not.
    """
    if not is_ours(run):
        raise TakenOverError

"""Fencing tokens: only the newest start of a run may write into its folder.

The scheduler may requeue a job while its earlier start still runs, because it cannot end processes on a node that it
has lost. Each start therefore writes its name into the folder. A process that reads the name of another start there
exits without writing anything. This works even on disks whose locks do not reach from node to node. Outside of a
scheduler the start has the name of its claim (`quantexp.runs.claim`).
"""

from __future__ import annotations

import os

from quantexp.runs.disk import write_whole
from quantexp.runs.paths import RunDir

#: The variable in which a launcher names each of its starts, such as the job's id and its restart count.
START = "QUANTEXP_START"


class TakenOverError(BaseException):
    """This process belongs to a start that is no longer the newest; a BaseException, so that no handler catches it."""


def own_start() -> str:
    """The name of this process's start; empty if its launcher gives it none."""
    return os.environ.get(START, "")


def take_over(run: RunDir, start: str | None = None) -> None:
    """Make a start the only one that may write; None stands for this process's."""
    write_whole(run.start, own_start() if start is None else start)


def is_newest(run: RunDir, start: str) -> bool:
    """Whether no other start has taken over the run; false also if its folder is gone."""
    try:
        return run.start.read_text() == start
    except OSError:
        return False


def is_ours(run: RunDir) -> bool:
    """Whether this process may write; any may that has no start."""
    return not own_start() or is_newest(run, own_start())


def require_ours(run: RunDir) -> None:
    """Stop this process if another start has taken over the run.

    Raises:
        TakenOverError: another start may write, this one may not.
    """
    if not is_ours(run):
        raise TakenOverError

"""Fencing tokens: only the newest start of a job, or the newest claim, may write into a run's folder.

The scheduler may requeue a job while its earlier start still runs, because it cannot end processes on a node that it
has lost. Each start therefore writes its name into the folder. A process that reads the name of another start there
exits without writing anything. This works even on disks whose locks do not reach from node to node. Likewise a process
that a claim (`quantexp.runs.claim`) started exits once there is a newer one.
"""

from __future__ import annotations

import functools
import os

from quantexp.runs.claim import Claim, inherited_claim
from quantexp.runs.paths import RunDir
from quantexp.runs.status import write_whole

#: The variable in which a job's launcher names each of its starts, such as the job's id and its restart count.
START = "QUANTEXP_START"
#: The variable with the token of the claim under which a worker runs.
CLAIM = "QUANTEXP_CLAIM"


class TakenOverError(BaseException):
    """This process belongs to a start that is no longer the newest; a BaseException, so that no handler catches it."""


def own_start() -> str:
    """The name of this process's start; empty if its launcher gives it none."""
    return os.environ.get(START, "")


def take_over(run: RunDir) -> None:
    """Make this process's start the only one that may write."""
    write_whole(run.start, own_start())


def is_ours(run: RunDir) -> bool:
    """Whether this process may write; any may that has neither a start nor a claim."""
    start, token = own_start(), os.environ.get(CLAIM)
    if token is not None and not _claim(run, token).is_valid():
        return False
    try:
        return not start or run.start.read_text() == start
    except OSError:
        return False


@functools.cache
def _claim(run: RunDir, token: str) -> Claim:
    return inherited_claim(run, token)


def require_ours(run: RunDir) -> None:
    """Stop this process if another start has taken over the run.

    Raises:
        TakenOverError: another start may write, this one may not.
    """
    if not is_ours(run):
        raise TakenOverError

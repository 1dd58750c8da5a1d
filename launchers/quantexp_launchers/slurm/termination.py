"""What the scheduler did to a job that did not end by itself, from what it says of the job as that ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from quantexp.runs.status import State, Status

#: What a node prints into a job's own output as it ends the job.
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON (\S+) CANCELLED AT (\S+) DUE TO ([A-Z ]+)")
_CAUSES = {
    "PREEMPTION": "preempted by another job",
    "NODE FAILURE": "its node {node} was lost",
    "JOB REQUEUE": "requeued",
}
#: The cause where nothing says more.
PUT_BACK_WORDS = "put back into the queue"
_NOTHING = ("", "None", "Unknown", "N/A", "(null)")


@dataclass(frozen=True)
class TakenAway:
    """What the scheduler did to a job that did not end by itself."""

    state: State
    reason: str
    #: The scheduler starts it again.
    comes_back: bool = False
    #: It does so only if it is asked to.
    has_to_ask: bool = False
    #: More time would help.
    too_short: bool = False


def cause_printed(output: Path, since: str | None) -> str | None:
    """Why a job was put back into the queue, from its own output; None where that does not say.

    Args:
        output: what the job's script printed, over all its starts.
        since: when the start that is meant began, UTC in ISO 8601.
    """
    try:
        found = _CANCELLED.findall(output.read_text(errors="replace"))
    except OSError:
        return None
    if not found or since is None:
        return None
    node, at, why = found[-1]
    before = datetime.fromisoformat(at).astimezone() < datetime.fromisoformat(since).replace(
        microsecond=0
    )
    return None if before or why.strip() not in _CAUSES else _CAUSES[why.strip()].format(node=node)


def taken_away(
    job: Mapping[str, str], starts_before: int, printed: str | None = None
) -> TakenAway | None:
    """What `scontrol show job` says of a job that is about to end; None where the scheduler did nothing.

    SLURM 22.05 calls most jobs that it ends COMPLETING, whatever the cause, which is their reason; a job that is
    cancelled has none. One that is put back has counted its restart by then. One that is preempted has the time of
    that, goes on RUNNING until its grace is over, and would count as failed if it ended by itself within it.

    Args:
        job: the fields of its record.
        starts_before: how often it had been started before this time.
        printed: the cause that its own output gives.
    """
    state, reason = job.get("JobState", ""), job.get("Reason", "")
    preempted = job.get("PreemptTime", "") not in _NOTHING
    if int(job.get("Restarts", "0")) > starts_before:
        return TakenAway(State.PREEMPTED, printed or PUT_BACK_WORDS, comes_back=True)
    if preempted:
        return TakenAway(
            State.PREEMPTED, "preempted by another job", comes_back=True, has_to_ask=True
        )
    if state == "TIMEOUT" or reason == "TimeLimit":
        limit = f"the time limit of {job.get('TimeLimit')} was reached"
        return TakenAway(State.PREEMPTED, limit, too_short=True)
    if state == "NODE_FAIL" or reason == "NodeDown":
        return TakenAway(State.PREEMPTED, f"a node was lost ({job.get('NodeList')})")
    if state not in ("COMPLETING", "CANCELLED", "DEADLINE", "PREEMPTED"):
        return None
    if state in ("COMPLETING", "CANCELLED") and reason in _NOTHING:
        return TakenAway(State.CANCELLED, "cancelled in the scheduler")
    why = state.lower() if reason in _NOTHING else reason
    return TakenAway(State.PREEMPTED, f"ended by the scheduler ({why})")


def in_words(taken: TakenAway, status: Status, max_requeue: int) -> tuple[State, str]:
    """The run's state and reason: what was done, how far it was, and what follows."""
    done = f"{taken.reason} at iteration {status.iteration} of {status.iterations}"
    if taken.state is State.CANCELLED:
        return taken.state, done
    again = "it will begin again at its first iteration"
    if not taken.comes_back:
        more = ", so give launcher.time_min more to quantexp resume" if taken.too_short else ""
        return taken.state, f"{done}; {again}{more}"
    if len(status.restarts) < max_requeue:
        return taken.state, f"{done}; {again}"
    if max_requeue == 0:
        return taken.state, f"{done}; launcher.max_requeue=0 does not put it back into the queue"
    return State.FAILED, one_too_many([*reasons(status), done], max_requeue)


def one_too_many(reasons: list[str], max_requeue: int) -> str:
    """Why a run that was put back once more is not started again."""
    return (
        f"the scheduler put it back {len(reasons)} times, and launcher.max_requeue={max_requeue} allows no more: "
        + "; ".join(reasons)
    )


def reasons(status: Status) -> list[str]:
    """Why each of the run's earlier starts ended."""
    return [str(restart["reason"]) for restart in status.restarts]


def record_of(records: str, job_id: str) -> dict[str, str]:
    """The `Name=value` pairs of one job among what `scontrol show job --oneliner` prints; empty where it is not there.

    Asked for the number of an array's last task, scontrol prints all tasks. A value ends before the next name; of names
    that come again, in a path for instance, the first counts.
    """
    for line in records.splitlines():
        fields: dict[str, str] = {}
        for name, value in re.findall(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", line.strip()):
            fields.setdefault(name, value)
        if fields.get("JobId") == job_id:
            return fields
    return {}

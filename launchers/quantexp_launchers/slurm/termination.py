"""Determines from the scheduler's record of an ending job whether and why the scheduler ended it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from quantexp.runs.status import State, Status

#: The line that a node prints into a job's output when it ends the job.
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON (\S+) CANCELLED AT (\S+) DUE TO ([A-Z ]+)")
_CAUSES = {
    "PREEMPTION": "preempted by another job",
    "NODE FAILURE": "its node {node} was lost",
    "JOB REQUEUE": "requeued",
}
#: The reason of a requeue without a more specific cause.
REQUEUED = "requeued"
_NO_VALUE = ("", "None", "Unknown", "N/A", "(null)")


@dataclass(frozen=True)
class Termination:
    """The end of a job by the scheduler."""

    state: State
    reason: str
    #: Whether the job is requeued.
    is_requeued: bool = False
    #: Whether the job's script must request the requeue.
    needs_request: bool = False
    #: Whether a longer time limit would help.
    is_timeout: bool = False


def cause_printed(output: Path, since: str | None) -> str | None:
    """Why a job was requeued, from its output; None if the output does not say.

    Args:
        output: the file with the output of the job's script, over all its starts.
        since: the time of the last start, UTC in ISO 8601.
    """
    try:
        matches = _CANCELLED.findall(output.read_text(errors="replace"))
    except OSError:
        return None
    if not matches or since is None:
        return None
    node, at, why = matches[-1]
    before = datetime.fromisoformat(at).astimezone() < datetime.fromisoformat(since).replace(
        microsecond=0
    )
    return None if before or why.strip() not in _CAUSES else _CAUSES[why.strip()].format(node=node)


def termination_of(
    job: Mapping[str, str], starts_before: int, printed: str | None = None
) -> Termination | None:
    """The termination of an ending job, from `scontrol show job`; None if the scheduler did not end it.

    SLURM 22.05 reports most jobs that it ends as COMPLETING and puts the cause into the reason; a cancelled job has no
    reason. A requeued job has an increased restart count. A preempted job has a preemption time, stays RUNNING during
    its grace time, and would count as failed if it ended by itself within that time.

    Args:
        job: the fields of the job's record.
        starts_before: the number of starts before this one.
        printed: the cause from the job's own output.
    """
    state, reason = job.get("JobState", ""), job.get("Reason", "")
    preempted = job.get("PreemptTime", "") not in _NO_VALUE
    if int(job.get("Restarts", "0")) > starts_before:
        return Termination(State.PREEMPTED, printed or REQUEUED, is_requeued=True)
    if preempted:
        return Termination(
            State.PREEMPTED, "preempted by another job", is_requeued=True, needs_request=True
        )
    if state == "TIMEOUT" or reason == "TimeLimit":
        limit = f"the time limit of {job.get('TimeLimit')} was reached"
        return Termination(State.PREEMPTED, limit, is_timeout=True)
    if state == "NODE_FAIL" or reason == "NodeDown":
        return Termination(State.PREEMPTED, f"a node was lost ({job.get('NodeList')})")
    if state not in ("COMPLETING", "CANCELLED", "DEADLINE", "PREEMPTED"):
        return None
    if state in ("COMPLETING", "CANCELLED") and reason in _NO_VALUE:
        return Termination(State.CANCELLED, "cancelled in the scheduler")
    why = state.lower() if reason in _NO_VALUE else reason
    return Termination(State.PREEMPTED, f"ended by the scheduler ({why})")


def outcome_of(termination: Termination, status: Status, max_requeue: int) -> tuple[State, str]:
    """The run's state and reason: the cause, the progress, and the consequence."""
    cause = f"{termination.reason} at iteration {status.iteration} of {status.iterations}"
    if termination.state is State.CANCELLED:
        return termination.state, cause
    again = "it will begin again at its first iteration"
    if not termination.is_requeued:
        more = (
            ", so give launcher.time_min more to quantexp resume" if termination.is_timeout else ""
        )
        return termination.state, f"{cause}; {again}{more}"
    if len(status.restarts) < max_requeue:
        return termination.state, f"{cause}; {again}"
    if max_requeue == 0:
        return termination.state, f"{cause}; launcher.max_requeue=0 allows no requeue"
    return State.FAILED, too_many_requeues([*reasons(status), cause], max_requeue)


def too_many_requeues(reasons: list[str], max_requeue: int) -> str:
    """The reason of a run that exceeds `launcher.max_requeue`."""
    return (
        f"requeued {len(reasons)} times, and launcher.max_requeue={max_requeue} allows no more: "
        + "; ".join(reasons)
    )


def reasons(status: Status) -> list[str]:
    """The reason of the end of each earlier start."""
    return [str(restart["reason"]) for restart in status.restarts]


def record_of(records: str, job_id: str) -> dict[str, str]:
    """The `Name=value` pairs of one job in the output of `scontrol show job --oneliner`; empty if it is not there.

    For the id of an array's last task, scontrol prints all tasks. A value ends before the next name. If a name repeats,
    for instance inside a path, the first occurrence counts.
    """
    for line in records.splitlines():
        fields: dict[str, str] = {}
        for name, value in re.findall(r"(\S+?)=(.*?)(?= \S+?=|\s*$)", line.strip()):
            fields.setdefault(name, value)
        if fields.get("JobId") == job_id:
            return fields
    return {}

"""What the end of a SLURM job means for its run: one table, for the job's own end on its node and for the ledger.

`preempted` is an end from outside, after which the run can start again unchanged; `failed` is an end that would happen
again; `cancelled` is the user's decision.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from quantexp.runs.outcome import ENDED_FROM_OUTSIDE, signal_name
from quantexp.runs.status import State, Status, requeues
from quantexp_launchers.slurm.states import JobState, SlurmJob, minutes


@dataclass(frozen=True)
class End:
    """The state of a run after its job, and the cause in words."""

    state: State
    #: With the job's own values; {at} is the run's progress.
    cause: str
    #: What the user can do about it.
    advice: str = ""
    #: Whether the job is requeued while `launcher.max_requeue` allows it, if the job's script sees this end.
    is_requeued: bool = False
    #: The same, if the run has a checkpoint to go on from; without one it would only come to the same end again.
    is_requeued_with_checkpoint: bool = False


ENDS = {
    JobState.TIMEOUT: End(
        State.PREEMPTED,
        "the time limit{limit} was reached{at}",
        "so give launcher.time_min more to quantexp resume",
        is_requeued_with_checkpoint=True,
    ),
    JobState.DEADLINE: End(State.PREEMPTED, "the deadline of job {job.id} was reached{at}"),
    JobState.PREEMPTED: End(State.PREEMPTED, "preempted by another job{at}", is_requeued=True),
    JobState.REQUEUED: End(State.PREEMPTED, "requeued{at}", is_requeued=True),
    JobState.NODE_FAIL: End(State.PREEMPTED, "{node} was lost{at}"),
    JobState.BOOT_FAIL: End(State.PREEMPTED, "{node} did not boot{at}"),
    #: Ended by SLURM for a reason that this table does not know.
    JobState.UNKNOWN: End(State.PREEMPTED, "ended by the scheduler{reason}{at}"),
    JobState.CANCELLED: End(State.CANCELLED, "cancelled in the scheduler{reason}{at}"),
    # Ends caused by the run itself; the job's script takes them from the ranks' records.
    JobState.OUT_OF_MEMORY: End(
        State.FAILED, "job {job.id} ran out of memory{at}", "give launcher.mem_gb more"
    ),
    JobState.COMPLETED: End(State.FAILED, "job {job.id} has completed, and the run did not"),
    JobState.FAILED: End(State.FAILED, "job {job.id} {exit}"),
}
#: The reason of a requeue without a more specific cause.
REQUEUED = "requeued"
#: Prefixes of reasons that are less specific than what the node may have printed.
_VAGUE = (REQUEUED, ENDED_FROM_OUTSIDE)
#: The line that a node prints into a job's output when it ends the job.
_PRINTED = re.compile(r"\*\*\* JOB \S+ ON (\S+) CANCELLED AT (\S+) DUE TO ([A-Z ]+)")
_PRINTED_STATES = {
    "PREEMPTION": JobState.PREEMPTED,
    "NODE FAILURE": JobState.NODE_FAIL,
    "JOB REQUEUE": JobState.REQUEUED,
}
_NO_VALUE = ("", "None", "Unknown", "N/A", "(null)")


def run_end(
    job: SlurmJob, status: Status, cause: str | None = None, *, first: int = 1
) -> tuple[State, str]:
    """The state and reason of a run after its job: the cause, the progress, and the consequence.

    Args:
        job: the job, which has ended or is ending.
        status: what the run recorded last.
        cause: a more specific cause than the job's state.
        first: the iteration at which the run goes on.
    """
    end = ENDS[job.state]
    at = "" if status.state is State.PENDING else f" at {progress(status)}"
    cause = cause_of(job, at) if cause is None else f"{cause}{at}"
    if end.state is not State.PREEMPTED:
        return end.state, "; ".join(filter(None, (cause, end.advice)))
    if first > 1:
        return end.state, f"{cause}; it will go on at iteration {first}"
    again = ", ".join(filter(None, ("it will begin again at its first iteration", end.advice)))
    return end.state, f"{cause}; {again}"


def is_requeued(job: SlurmJob, first: int) -> bool:
    """Whether a run whose job ends so is to start again by itself; `first` is where it goes on."""
    end = ENDS[job.state]
    return end.is_requeued or (end.is_requeued_with_checkpoint and first > 1)


def end_in_job(
    job: SlurmJob, status: Status, max_requeue: int, printed: str | None, *, first: int = 1
) -> tuple[State, str]:
    """`run_end` as the job's own script records it, which knows whether the job is requeued."""
    cause = printed if job.state is JobState.REQUEUED else None
    state, reason = run_end(job, status, cause, first=first)
    if not is_requeued(job, first) or len(requeues(status)) < max_requeue:
        return state, reason
    cause = reason.partition("; ")[0]
    if max_requeue == 0:
        return state, f"{cause}; launcher.max_requeue=0 allows no requeue"
    return State.FAILED, too_many_requeues([*reasons(status), cause], max_requeue)


def cause_of(job: SlurmJob, at: str = "") -> str:
    """The cause of a job's end in words."""
    # A job cancelled while it waited keeps its last waiting reason (Priority), which is not the cause.
    is_cause = job.state is not JobState.CANCELLED or (job.reason or "").startswith("Dependency")
    return ENDS[job.state].cause.format(
        job=job,
        at=at,
        limit=f" of {job.time_limit_min} min" if job.time_limit_min else "",
        node=f"node {job.nodes}" if job.nodes else "a node",
        reason=f" ({job.reason})" if job.reason and is_cause else "",
        exit=_exit(job),
    )


def ending_job(record: Mapping[str, str], starts_before: int) -> SlurmJob | None:
    """The job in `scontrol show job` while SLURM ends it; None if SLURM does not end it.

    SLURM 22.05 reports most jobs that it ends as COMPLETING and puts the cause into the reason; a cancelled job has no
    reason. A requeued job has an increased restart count. A preempted job has a preemption time, stays RUNNING during
    its grace time, and would count as failed if it ended by itself within that time.

    Args:
        record: the fields of the job's record.
        starts_before: the number of starts before this one.
    """
    state = _ending_state(record, starts_before)
    if state is None:
        return None
    reason, nodes = record.get("Reason", ""), record.get("NodeList", "")
    return SlurmJob(
        record.get("JobId", ""),
        record.get("JobName", ""),
        state,
        None if reason in _NO_VALUE else reason,
        nodes=None if nodes in _NO_VALUE else nodes,
        time_limit_min=minutes(record.get("TimeLimit", "")),
    )


def _ending_state(record: Mapping[str, str], starts_before: int) -> JobState | None:
    state, reason = record.get("JobState", ""), record.get("Reason", "")
    if int(record.get("Restarts", "0")) > starts_before:
        return JobState.REQUEUED
    if state == "PREEMPTED" or record.get("PreemptTime", "") not in _NO_VALUE:
        return JobState.PREEMPTED
    if state == "TIMEOUT" or reason == "TimeLimit":
        return JobState.TIMEOUT
    if state == "NODE_FAIL" or reason == "NodeDown":
        return JobState.NODE_FAIL
    if state == "DEADLINE":
        return JobState.DEADLINE
    if state in ("COMPLETING", "CANCELLED"):
        return JobState.CANCELLED if reason in _NO_VALUE else JobState.UNKNOWN
    return None


def cause_printed(output: Path, since: str | None) -> str | None:
    """Why a job was requeued, from its output; None if the output does not say.

    Args:
        output: the file with the output of the job's script, over all its starts.
        since: the time of the last start, UTC in ISO 8601.
    """
    try:
        matches = _PRINTED.findall(output.read_text(errors="replace"))
    except OSError:
        return None
    if not matches or since is None:
        return None
    node, at, why = matches[-1]
    start = datetime.fromisoformat(since).replace(microsecond=0)
    if datetime.fromisoformat(at).astimezone() < start or why.strip() not in _PRINTED_STATES:
        return None
    return cause_of(SlurmJob("", "", _PRINTED_STATES[why.strip()], nodes=node))


def restart_reason(before: Status, printed: str | None) -> str:
    """Why the scheduler starts a job again.

    Args:
        before: what the earlier start recorded last.
        printed: the cause that the node printed into the job's output; None if it printed none.
    """
    at = f"at {progress(before)}"
    recorded = before.reason.partition("; ")[0]
    if before.state is State.FAILED:
        return f"requeued after a failure ({recorded})"
    if before.state is State.PREEMPTED and not recorded.startswith(_VAGUE):
        return recorded
    if printed is not None:
        return f"{printed} {at}"
    if before.state is State.PREEMPTED:
        return recorded
    if before.started is None:
        return "requeued before its first iteration"
    return f"died without recording why on {before.host} {at} (node lost?)"


def too_many_requeues(reasons: list[str], max_requeue: int) -> str:
    """The reason of a run that exceeds `launcher.max_requeue`."""
    return (
        f"requeued {len(reasons)} times, and launcher.max_requeue={max_requeue} allows no more: "
        + "; ".join(reasons)
    )


def reasons(status: Status) -> list[str]:
    """The reason of the end of each start that the scheduler repeated."""
    return [str(restart["reason"]) for restart in requeues(status)]


def progress(status: Status) -> str:
    """`iteration 3 of 8`."""
    return f"iteration {status.iteration} of {status.iterations}"


def read_within(stream: int, within_s: float) -> str:
    """The content of a stream until it is closed or the time is up."""
    deadline, parts = time.monotonic() + within_s, []
    while (left := deadline - time.monotonic()) > 0 and select.select([stream], [], [], left)[0]:
        part = os.read(stream, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


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


def _exit(job: SlurmJob) -> str:
    if job.signal:
        return f"was ended by {signal_name(job.signal)}"
    if job.exit_code > 128:
        return f"failed with exit code {job.exit_code} ({signal_name(job.exit_code - 128)})"
    reason = f" ({job.reason})" if job.reason and job.reason != "NonZeroExitCode" else ""
    return f"failed with exit code {job.exit_code}{reason}"

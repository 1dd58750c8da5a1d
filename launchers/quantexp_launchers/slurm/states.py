"""A job of SLURM, described independently of SLURM's version and of the client that reported it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class JobState(StrEnum):
    """The state of a job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    REQUEUED = "requeued"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    DEADLINE = "deadline"
    BOOT_FAIL = "boot_fail"
    #: A state that this version does not know; it counts as alive, so that no run is started twice.
    UNKNOWN = "unknown"

    @property
    def alive(self) -> bool:
        """Whether the job may still run or write."""
        return self not in _ENDED


_ENDED = {
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.PREEMPTED,
    JobState.NODE_FAIL,
    JobState.OUT_OF_MEMORY,
    JobState.DEADLINE,
    JobState.BOOT_FAIL,
}
#: SLURM states that map to another state here.
_MAPPED_STATES = {
    "CONFIGURING": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "RESV_DEL_HOLD": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.REQUEUED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "REVOKED": JobState.CANCELLED,
}


def job_state(text: str) -> JobState:
    """Parse SLURM's text for a state: `RUNNING`, `CANCELLED by 0`, `CANCELLED+` (truncated by a narrow column)."""
    word = (text.split() or [""])[0].rstrip("+")
    if word in _MAPPED_STATES:
        return _MAPPED_STATES[word]
    name = word.lower()
    return JobState(name) if name in set(JobState) else JobState.UNKNOWN


@dataclass(frozen=True)
class SlurmJob:
    """One job, or one task of an array."""

    #: 123, or 123_4 in an array.
    id: str
    name: str
    state: JobState
    #: Why the job waits or has ended, in the scheduler's own word: Resources, Dependency, TimeLimit; None if none.
    reason: str | None = None
    exit_code: int = 0
    #: The signal that ended the job; 0 if none did.
    signal: int = 0
    #: The number of requeues; 0 if only accounting knows the job.
    restarts: int = 0
    #: The nodes as SLURM writes them: n1, n[1-2].
    nodes: str | None = None
    ended: datetime | None = None
    #: None if there is no limit, or if it is unknown.
    time_limit_min: int | None = None

    @property
    def alive(self) -> bool:
        """Whether the job may still run or write."""
        return self.state.alive


def waits(job: SlurmJob) -> bool:
    """Whether the job has not started, or will start again."""
    return job.state in (JobState.PENDING, JobState.REQUEUED)


def describe(job: SlurmJob) -> str:
    """The activity of a live job: waiting (Resources), running on n1, ending on n1."""
    if waits(job):
        return f"waiting ({job.reason})" if job.reason else "waiting"
    words = {JobState.COMPLETING: "ending", JobState.SUSPENDED: "suspended"}
    word = words.get(job.state, "running")
    return f"{word} on {job.nodes}" if job.nodes else word


def base_id(job_id: str) -> str:
    """The id of the job or array: 123 for 123_4."""
    return job_id.partition("_")[0]


def task_index(job_id: str) -> int | None:
    """The index in an array: 4 for 123_4; None without an array."""
    index = job_id.partition("_")[2]
    return int(index) if index.isdecimal() else None


def minutes(text: str) -> int | None:
    """Minutes of [days-][hours:]minutes:seconds; None for other texts such as UNLIMITED."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return None
    hours = int(parts[-3]) if len(parts) > 2 else 0
    return int(days or 0) * 1440 + hours * 60 + int(parts[-2])

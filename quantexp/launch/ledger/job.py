"""A job as the scheduler describes it, in words that do not depend on which client was asked or how old it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class JobState(StrEnum):
    """Where a job is in its life."""

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
    #: A word this version does not know; taken for alive, so that no run is started twice.
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
#: Words of SLURM that are no state of their own here.
_OTHER_WORDS = {
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


def job_state(words: str) -> JobState:
    """SLURM's words for a state: `RUNNING`, `CANCELLED by 0`, `CANCELLED+` (cut by a narrow column)."""
    word = (words.split() or [""])[0].rstrip("+")
    if word in _OTHER_WORDS:
        return _OTHER_WORDS[word]
    known = word.lower()
    return JobState(known) if known in set(JobState) else JobState.UNKNOWN


@dataclass(frozen=True)
class Job:
    """One job, or one task of an array."""

    #: 123, or 123_4 in an array.
    id: str
    name: str
    state: JobState
    #: Why it waits or has ended, the scheduler's own word: Resources, Dependency, TimeLimit; None is none.
    reason: str | None = None
    exit_code: int = 0
    #: What ended it, where a signal did.
    signal: int = 0
    #: How often it was put back into the queue; 0 where only accounting knows the job.
    restarts: int = 0
    #: As SLURM writes them: n1, n[1-2].
    nodes: str | None = None
    ended: datetime | None = None
    #: None is no limit, or not said.
    time_limit_min: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it may still run or write."""
        return self.state.alive


def doing(job: Job) -> str:
    """What a job that is alive does: waiting (Resources), running on n1, ending on n1."""
    if job.state in (JobState.PENDING, JobState.REQUEUED):
        return f"waiting ({job.reason})" if job.reason else "waiting"
    words = {JobState.COMPLETING: "ending", JobState.SUSPENDED: "suspended"}
    word = words.get(job.state, "running")
    return f"{word} on {job.nodes}" if job.nodes else word


def base_id(job_id: str) -> str:
    """The job or array that a job belongs to: 123 of 123_4."""
    return job_id.partition("_")[0]


def task_index(job_id: str) -> int | None:
    """The place in an array: 4 of 123_4."""
    index = job_id.partition("_")[2]
    return int(index) if index.isdecimal() else None

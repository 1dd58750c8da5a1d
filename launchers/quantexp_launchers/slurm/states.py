"""A job of SLURM, described independently of SLURM's version and of the client that reported it, squeue or sacct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
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
#: squeue's columns and their widths; fixed widths, because a name may contain any separator.
QUEUE_WIDTHS = {
    "JobArrayID": 40,
    "State": 24,
    "exit_code": 12,
    "RestartCnt": 12,
    "EndTime": 24,
    "TimeLimit": 24,
    "NodeList": 128,
    "Reason": 128,
    "Name": 128,
}
#: sacct's columns; the name is last, because it may contain the separator.
ACCOUNTING_FIELDS = (
    *("JobID", "State", "ExitCode", "Submit", "End"),
    *("TimelimitRaw", "NodeList", "JobName"),
)
#: SLURM's texts for a missing value.
_NO_VALUE = {"", "None", "N/A", "NONE", "Unknown", "(null)", "None assigned"}
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


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


def ids_of_tasks(job_id: str, num_tasks: int) -> list[str]:
    """The id of each task of a job: 123_0, 123_1, ..., or 123 if there is only one."""
    return [job_id] if num_tasks == 1 else [f"{job_id}_{task}" for task in range(num_tasks)]


def minutes(text: str) -> int | None:
    """Minutes of [days-][hours:]minutes:seconds; None for other texts such as UNLIMITED."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return None
    hours = int(parts[-3]) if len(parts) > 2 else 0
    return int(days or 0) * 1440 + hours * 60 + int(parts[-2])


def parse_queue_line(line: str) -> SlurmJob | None:
    """The job of a line of squeue with the columns of QUEUE_WIDTHS; None for the heading of another cluster's list."""
    cells, start = [], 0
    for width in QUEUE_WIDTHS.values():
        cells.append(line[start : start + width].strip())
        start += width
    job_id, state, status, restarts, end, limit, nodes, reason, name = cells
    if not job_id[:1].isdecimal():
        return None
    code, signal = _wait_status(status)
    current = job_state(state)
    return SlurmJob(
        job_id,
        name,
        current,
        _or_none(reason),
        code,
        signal,
        int(restarts) if restarts.isdecimal() else 0,
        _or_none(nodes),
        None
        if current.alive
        else _time(end),  # for a running job, EndTime is the end of its time limit
        minutes(limit),
    )


def parse_accounting_row(row: list[str]) -> Iterator[SlurmJob]:
    """The jobs of a row of sacct with the columns of ACCOUNTING_FIELDS; several for tasks that share a row."""
    job_ids, state, codes, _, end, limit, nodes, name = row
    code, _, signal = codes.partition(":")
    for job_id in _tasks(job_ids):
        yield SlurmJob(
            job_id,
            name,
            job_state(state),
            None,
            int(code or 0),
            int(signal or 0),
            0,
            _or_none(nodes),
            _time(end),
            int(limit) if limit.isdecimal() else None,
        )


def _tasks(job_id: str) -> Iterator[str]:
    """Expand an id: 123, 123_4, or 123_[4-7,9-15:2%2]; a list that SLURM truncated (...) yields its visible part."""
    number, _, tasks = job_id.partition("_")
    if not tasks.startswith("["):
        yield job_id
        return
    for first, last, step in _RANGE.findall(tasks.strip("[]").partition("%")[0]):
        for index in range(int(first), int(last or first) + 1, int(step or 1)):
            yield f"{number}_{index}"


def _wait_status(text: str) -> tuple[int, int]:
    """Exit code and signal, from a wait status (squeue: 768 is exit code 3) or from CODE:SIGNAL."""
    if ":" in text:
        code, _, signal = text.partition(":")
        return int(code or 0), int(signal or 0)
    status = int(text) if text.isdecimal() else 0
    return status >> 8 & 0xFF, status & 0x7F


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() else None


def _or_none(text: str) -> str | None:
    return None if text in _NO_VALUE else text

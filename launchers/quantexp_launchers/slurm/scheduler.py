"""Queries SLURM about jobs: squeue first, then sacct for jobs that the controller has forgotten.

squeue reads the controller's memory: pending and running jobs, and ended jobs for some minutes (MinJobAge). It returns
as much as `scontrol show job`, for many jobs in one call. sacct reads the accounting database, which a cluster need not
have; without it, a job that squeue does not know stays unknown.

Three properties of SLURM matter here. Array tasks that were cancelled together before they started share one line under
the array's id. A single task that was cancelled before it started is in no database. A job that is alive according to
accounting, but unknown to the controller, was lost with the controller's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from quantexp_launchers.slurm.clients import ClientError, run_client
from quantexp_launchers.slurm.states import SlurmJob, base_id, job_state, minutes, task_index

#: Maximum job ids in one call, which limits the length of the command line.
IDS_PER_CALL = 500
#: Days that a search of accounting by name covers if no start is given.
SEARCH_DAYS = 31
#: squeue's columns and their widths; fixed widths, because a name may contain any separator.
_WIDTHS = {
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
_FIELDS = ("JobID", "State", "ExitCode", "Submit", "End", "TimelimitRaw", "NodeList", "JobName")
#: SLURM's texts for a missing value.
_NO_VALUE = {"", "None", "N/A", "NONE", "Unknown", "(null)", "None assigned"}
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def jobs(ids: Iterable[str], past: Iterable[str] | None = None) -> dict[str, SlurmJob]:
    """The jobs with these ids (123, or 123_4), alive or ended; unknown ids are absent.

    The controller knows all live jobs, and those that ended minutes ago. `past` are the ids to query in accounting if
    the controller does not know them; None means all.

    Raises:
        ClientError: SLURM is not installed, or its controller or its accounting does not answer.
    """
    requested = set(ids)
    queued = _query(requested, _queue)
    return queued | _query((requested if past is None else set(past)) - set(queued), _accounting)


def jobs_named(
    name: str, since: datetime | None = None, *, past: bool = True
) -> dict[int | None, SlurmJob]:
    """The jobs with this name by their index in the array; the key is None for a job without an array.

    `since` is the earliest time of submission; without it accounting is searched for the last SEARCH_DAYS days.
    Without `past` only the controller is queried.

    Raises:
        ClientError: SLURM is not installed, or its controller or its accounting does not answer.
    """
    jobs_by_id: dict[str, SlurmJob] = {}
    if past:
        start = since or datetime.now(UTC) - timedelta(days=SEARCH_DAYS)
        jobs_by_id = _accounting(
            f"--name={name}", f"--starttime={start.astimezone():%Y-%m-%dT%H:%M:%S}"
        )
    jobs_by_id |= _queue(f"--name={name}")
    return {task_index(job_id): job for job_id, job in jobs_by_id.items() if job.name == name}


def cancel(ids: list[str]) -> None:
    """Cancel jobs; jobs that have already ended are ignored.

    Raises:
        ClientError: SLURM is not installed, or its controller does not answer.
    """
    for first in range(0, len(ids), IDS_PER_CALL):
        run_client(["scancel", *ids[first : first + IDS_PER_CALL]])


def kill(ids: list[str]) -> None:
    """Kill all processes of jobs, their scripts included.

    Raises:
        ClientError: SLURM is not installed, or its controller does not answer.
    """
    for first in range(0, len(ids), IDS_PER_CALL):
        run_client(["scancel", "--signal=KILL", "--full", *ids[first : first + IDS_PER_CALL]])


def _query(ids: set[str], source: Callable[[str], dict[str, SlurmJob]]) -> dict[str, SlurmJob]:
    """The jobs that a source knows of these ids. A task without its own line is in the line of its array."""
    numbers = sorted({base_id(job_id) for job_id in ids})
    by_id: dict[str, SlurmJob] = {}
    for first in range(0, len(numbers), IDS_PER_CALL):
        by_id |= source("--jobs=" + ",".join(numbers[first : first + IDS_PER_CALL]))
    matches = {job_id: by_id.get(job_id) or by_id.get(base_id(job_id)) for job_id in ids}
    return {job_id: job for job_id, job in matches.items() if job is not None}


def _queue(which: str) -> dict[str, SlurmJob]:
    """The jobs and tasks that squeue lists, including ended ones."""
    columns = ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())
    try:
        text = run_client(
            ["squeue", "--noheader", "--array", "--all", "--states=all", which, "-O", columns]
        )
    except ClientError as error:
        if "Invalid job id" in error.last_line:  # a single id that the controller does not know
            return {}
        raise
    return {
        job.id: job for line in text.splitlines() if (job := _parse_queue_line(line)) is not None
    }


def _parse_queue_line(line: str) -> SlurmJob | None:
    cells, start = [], 0
    for width in _WIDTHS.values():
        cells.append(line[start : start + width].strip())
        start += width
    job_id, state, status, restarts, end, limit, nodes, reason, name = cells
    if not job_id[:1].isdecimal():  # the heading of another cluster's list
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


def _accounting(*which: str) -> dict[str, SlurmJob]:
    """The ended jobs that sacct lists; empty if the cluster has no accounting."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", *which]
    try:
        text = run_client([*command, f"--format={','.join(_FIELDS)}"])
    except ClientError as error:
        if error.missing or "accounting storage is disabled" in error.last_line:
            return {}
        raise
    rows = [line.split("|", len(_FIELDS) - 1) for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS)]
    # The newest submission of an id last; tasks with their own line after tasks that were cancelled together.
    rows.sort(key=lambda row: (row[3], "[" not in row[0]))
    jobs_by_id = {job.id: job for row in rows for job in _parse_accounting_row(row)}
    return {job_id: job for job_id, job in jobs_by_id.items() if not job.alive}


def _parse_accounting_row(row: list[str]) -> Iterator[SlurmJob]:
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

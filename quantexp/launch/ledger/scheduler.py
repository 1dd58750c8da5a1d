"""What SLURM says about jobs: squeue first, sacct for what the controller has forgotten.

squeue reads the controller's memory: jobs that wait or run, and ended ones for some minutes (MinJobAge). It gives
all that `scontrol show job` would, for many jobs in one call. sacct reads the accounting database, which a
cluster need not have: where it fails, a job that squeue does not know is not known.

Three things of SLURM that the reading has to know: tasks of an array that were cancelled together before they started
are one line under the array's number alone; a single task cancelled before it started is known to nobody any more; and
a job that accounting calls alive but the controller does not know was lost with the controller's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from quantexp.launch.ledger.clients import ClientError, ask
from quantexp.launch.ledger.job import Job, base_id, job_state, task_index

#: Job numbers in one call, so that no command line is too long.
IDS_A_CALL = 500
#: How far back accounting is searched for a name where no time is given, days.
SEARCH_DAYS = 31
#: squeue's columns and their widths. Fixed widths, because a name may hold any separator.
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
#: sacct's columns; the name last, because it may hold the separator.
_FIELDS = ("JobID", "State", "ExitCode", "Submit", "End", "TimelimitRaw", "NodeList", "JobName")
#: What SLURM writes where there is nothing.
_NOTHING = {"", "None", "N/A", "NONE", "Unknown", "(null)", "None assigned"}
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def jobs(ids: Iterable[str], past: Iterable[str] | None = None) -> dict[str, Job]:
    """The jobs with these ids (123, or 123_4), alive or ended; ids that nobody knows are absent.

    The controller knows all that are alive, and those that ended minutes ago. `past` are the ids that accounting is
    asked for where the controller does not know them: without it, all.

    Raises:
        ClientError: SLURM is not here, or its controller or its accounting does not answer.
    """
    wanted = set(ids)
    found = _asked(wanted, _queue)
    return found | _asked((wanted if past is None else set(past)) - set(found), _accounted)


def jobs_named(
    name: str, since: datetime | None = None, *, past: bool = True
) -> dict[int | None, Job]:
    """The jobs of one name by their place in the array; None is the place of a job that is no array's.

    `since` is when they were submitted at the earliest; without it accounting is searched SEARCH_DAYS back.
    Without `past` only the controller is asked.

    Raises:
        ClientError: SLURM is not here, or its controller or its accounting does not answer.
    """
    found: dict[str, Job] = {}
    if past:
        start = since or datetime.now(UTC) - timedelta(days=SEARCH_DAYS)
        found = _accounted(f"--name={name}", f"--starttime={start.astimezone():%Y-%m-%dT%H:%M:%S}")
    found |= _queue(f"--name={name}")
    return {task_index(job_id): job for job_id, job in found.items() if job.name == name}


def cancel(ids: list[str]) -> None:
    """Ask the scheduler to end jobs; those that have ended already are passed over.

    Raises:
        ClientError: SLURM is not here, or its controller does not answer.
    """
    for first in range(0, len(ids), IDS_A_CALL):
        ask(["scancel", *ids[first : first + IDS_A_CALL]])


def _asked(ids: set[str], source: Callable[[str], dict[str, Job]]) -> dict[str, Job]:
    """What a source says about these ids. A task without a line of its own stands in the line of its array."""
    numbers = sorted({base_id(job_id) for job_id in ids})
    found: dict[str, Job] = {}
    for first in range(0, len(numbers), IDS_A_CALL):
        found |= source("--jobs=" + ",".join(numbers[first : first + IDS_A_CALL]))
    theirs = {job_id: found.get(job_id) or found.get(base_id(job_id)) for job_id in ids}
    return {job_id: job for job_id, job in theirs.items() if job is not None}


def _queue(which: str) -> dict[str, Job]:
    """What squeue says, one job or task a line, ended ones included."""
    columns = ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())
    try:
        text = ask(
            ["squeue", "--noheader", "--array", "--all", "--states=all", which, "-O", columns]
        )
    except ClientError as error:
        if "Invalid job id" in error.said:  # one number, and the controller does not know it
            return {}
        raise
    return {job.id: job for line in text.splitlines() if (job := _in_queue(line)) is not None}


def _in_queue(line: str) -> Job | None:
    cells, start = [], 0
    for width in _WIDTHS.values():
        cells.append(line[start : start + width].strip())
        start += width
    job_id, state, status, restarts, end, limit, nodes, reason, name = cells
    if not job_id[:1].isdecimal():  # the head of another cluster's list
        return None
    code, signal = _wait_status(status)
    now = job_state(state)
    return Job(
        job_id,
        name,
        now,
        _or_none(reason),
        code,
        signal,
        int(restarts) if restarts.isdecimal() else 0,
        _or_none(nodes),
        None if now.alive else _time(end),  # of a job that runs, when its time limit ends it
        minutes(limit),
    )


def _accounted(*which: str) -> dict[str, Job]:
    """What sacct says of ended jobs; nothing where the cluster has no accounting."""
    words = ["sacct", "--noheader", "--parsable2", "--allocations", *which]
    try:
        text = ask([*words, f"--format={','.join(_FIELDS)}"])
    except ClientError as error:
        if error.missing or "accounting storage is disabled" in error.said:
            return {}
        raise
    rows = [line.split("|", len(_FIELDS) - 1) for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS)]
    # The newest submission of a number last; tasks of their own after those that were cancelled together.
    rows.sort(key=lambda row: (row[3], "[" not in row[0]))
    found = {job.id: job for row in rows for job in _past(row)}
    return {job_id: job for job_id, job in found.items() if not job.alive}


def _past(row: list[str]) -> Iterator[Job]:
    job_ids, state, codes, _, end, limit, nodes, name = row
    code, _, signal = codes.partition(":")
    for job_id in _tasks(job_ids):
        yield Job(
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
    """The ids behind one: 123, 123_4, or 123_[4-7,9-15:2%2]; of a list that SLURM cut (...), what is there."""
    number, _, tasks = job_id.partition("_")
    if not tasks.startswith("["):
        yield job_id
        return
    for first, last, step in _RANGE.findall(tasks.strip("[]").partition("%")[0]):
        for index in range(int(first), int(last or first) + 1, int(step or 1)):
            yield f"{number}_{index}"


def _wait_status(text: str) -> tuple[int, int]:
    """Exit code and signal, from a wait status (squeue: 768 is exit code 3) or as CODE:SIGNAL."""
    if ":" in text:
        code, _, signal = text.partition(":")
        return int(code or 0), int(signal or 0)
    status = int(text) if text.isdecimal() else 0
    return status >> 8 & 0xFF, status & 0x7F


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() else None


def minutes(text: str) -> int | None:
    """Minutes of [days-][hours:]minutes:seconds; UNLIMITED and the like are None."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return None
    hours = int(parts[-3]) if len(parts) > 2 else 0
    return int(days or 0) * 1440 + hours * 60 + int(parts[-2])


def _or_none(text: str) -> str | None:
    return None if text in _NOTHING else text

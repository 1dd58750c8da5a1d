"""Submits scripts to SLURM, queries it about jobs, and cancels them.

sbatch's errors are reported once, without its prefixes. Its environment excludes variables that it would read as
options or inherit from an enclosing job, and the files it writes are readable by the user alone.

A query asks squeue first, then sacct for jobs that the controller has forgotten. squeue reads the controller's memory:
pending and running jobs, and ended jobs for some minutes (MinJobAge). It returns as much as `scontrol show job`, for
many jobs in one call. sacct reads the accounting database, which a cluster need not have; without it, a job that squeue
does not know stays unknown.

Three properties of SLURM matter here. Array tasks that were cancelled together before they started share one line under
the array's id. A single task that was cancelled before it started is in no database. A job that is alive according to
accounting, but unknown to the controller, was lost with the controller's memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from quantexp.errors import RunError
from quantexp.schema import LauncherConfig
from quantexp_launchers.slurm.clients import CLIENT_S, ClientError, run_client
from quantexp_launchers.slurm.states import (
    ACCOUNTING_FIELDS,
    QUEUE_WIDTHS,
    SlurmJob,
    base_id,
    parse_accounting_row,
    parse_queue_line,
    task_index,
)

#: SLURM's default limit of the tasks of an array.
MAX_ARRAY = 1001
#: Maximum job ids in one call, which limits the length of the command line.
IDS_PER_CALL = 500
#: Days that a search of accounting by name covers if no start is given.
SEARCH_DAYS = 31
#: Prefixes of variables that sbatch reads as options (SBATCH_), or that describe an enclosing job.
_CONFUSING = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")
#: Variables with these prefixes that select the cluster, which stay.
_KEPT = ("SLURM_CONF", "SLURM_JWT")
#: The user's defaults for options that the configuration leaves out: variable -> the launcher's key.
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
_NO_ANSWER = (
    f"the SLURM controller does not answer within {CLIENT_S:.0f} s; see `scontrol ping` and whether munge runs, "
    "and try again"
)


def require_slurm() -> None:
    """Refuse to continue if SLURM's clients are missing.

    Raises:
        RunError: names the first missing client.
    """
    for client in ("sbatch", "srun", "squeue"):
        if shutil.which(client) is None:
            raise RunError(
                f"there is no SLURM here ({client} is not on PATH); submit from a login node, or leave launcher=slurm "
                "out to run on this machine"
            )


def max_array_size() -> int:
    """The largest number of tasks of an array on this cluster (MaxArraySize); the default if the controller is silent.

    1 on a cluster without arrays.
    """
    try:
        text = run_client(["scontrol", "show", "config"])
    except ClientError:
        return MAX_ARRAY
    sizes = re.findall(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return max(1, int(sizes[0])) if sizes else MAX_ARRAY


def submit_script(text: str, file: Path, launcher: LauncherConfig) -> str:
    """Write the script to a private file, submit it and return the job's id.

    Raises:
        RunError: SLURM refused the script, or did not answer; in the latter case it may have accepted it anyway.
    """
    file.write_text(text)
    file.chmod(0o600)
    answer = sbatch(["--parsable"], text, launcher)
    job_id = answer.strip().partition(";")[0]  # 123, or 123;cluster
    if not job_id.isdecimal():
        raise RunError(f"sbatch must answer with the job's id, got {answer.strip()!r}")
    return job_id


def sbatch(arguments: list[str], text: str, launcher: LauncherConfig) -> str:
    """The answer of sbatch to a script; the files of the job are readable by the user alone.

    Raises:
        RunError: sbatch refused the script, with its reasons, or did not answer.
    """
    try:
        completed = subprocess.run(
            ["sbatch", *arguments],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_S,
            env=_environment(launcher),
            umask=0o077,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(_NO_ANSWER) from error
    if completed.returncode:
        why = refusal(completed.stderr)
        raise RunError(f"SLURM refuses the job: {why}; {_request(launcher)}")
    return completed.stdout


def refusal(output: str) -> str:
    """The reason in sbatch's output."""
    reasons = [
        line.removeprefix("sbatch: ")
        .removeprefix("error: ")
        .removeprefix("allocation failure: ")
        .removeprefix("Batch job submission failed: ")
        for line in (line.strip() for line in output.splitlines())
        if line and not line.startswith("Try ")
    ]
    return "; ".join(dict.fromkeys(reasons)) or "it gives no reason"


def _request(launcher: LauncherConfig) -> str:
    """The request in terms of the configuration."""
    keys = [
        *("partition", "account", "qos", "time_min", "nodes", "gpus_per_node", "gpu_type"),
        *("cpus_per_process", "mem_gb", "constraint", "exclude", "nodelist", "reservation"),
        "mail_type",
    ]
    options = {key: getattr(launcher, key) for key in keys}
    options |= {f"sbatch.{name}": value for name, value in launcher.sbatch.items()}
    return "asked for " + ", ".join(
        f"launcher.{key}={value}" for key, value in options.items() if value is not None
    )


def _environment(launcher: LauncherConfig) -> dict[str, str]:
    """The environment for sbatch, which passes it to the job."""
    defaults = {name for name, key in _DEFAULTS.items() if getattr(launcher, key) is None}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_CONFUSING) or name in _KEPT or name in defaults
    }


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
    columns = ",".join(f"{name}:{width}" for name, width in QUEUE_WIDTHS.items())
    try:
        text = run_client(
            ["squeue", "--noheader", "--array", "--all", "--states=all", which, "-O", columns]
        )
    except ClientError as error:
        if "Invalid job id" in error.last_line:  # a single id that the controller does not know
            return {}
        raise
    return {
        job.id: job for line in text.splitlines() if (job := parse_queue_line(line)) is not None
    }


def _accounting(*which: str) -> dict[str, SlurmJob]:
    """The ended jobs that sacct lists; empty if the cluster has no accounting."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", *which]
    try:
        text = run_client([*command, f"--format={','.join(ACCOUNTING_FIELDS)}"])
    except ClientError as error:
        if error.missing or "accounting storage is disabled" in error.last_line:
            return {}
        raise
    rows = [line.split("|", len(ACCOUNTING_FIELDS) - 1) for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(ACCOUNTING_FIELDS)]
    # The newest submission of an id last; tasks with their own line after tasks that were cancelled together.
    rows.sort(key=lambda row: (row[3], "[" not in row[0]))
    jobs_by_id = {job.id: job for row in rows for job in parse_accounting_row(row)}
    return {job_id: job for job_id, job in jobs_by_id.items() if not job.alive}

"""Submits to SLURM: the script of a batch of runs, the check of a script, and sbatch.

    the configured environment, modules and setup lines
    quantexp_launchers.slurm.job begin    check the submission, move an earlier start aside
    srun ... quantexp_launchers.slurm.job rank   one for each rank; srun ends all tasks when one fails
    quantexp_launchers.slurm.job end      record the end, request a requeue

The script exits only with 0 or 1, because sacct changes codes above 127.

Before anything is submitted, `sbatch --test-only` checks each script; its error is reported once, without sbatch's
prefixes. sbatch's environment excludes variables that it would read as options or inherit from an enclosing job, and
the files it writes are readable by the user alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from quantexp.errors import RunError
from quantexp.runs.fencing import START
from quantexp.runs.paths import Submission
from quantexp.schema import LauncherConfig
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.check import check_time, nodes_out_of_service
from quantexp_launchers.slurm.clients import CLIENT_S
from quantexp_launchers.slurm.job import NOTHING_TO_DO, REQUEUE
from quantexp_launchers.slurm.script import first_lines, python, pyxis
from quantexp_launchers.slurm.script import script as assembled

#: The id of this job. The bare id of an array may also be a task's, and selects all tasks in scontrol.
_OWN_JOB = "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
#: The answer of `sbatch --test-only` if no nodes in service can run the job.
_NO_NODES = "Requested node configuration is not available"
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


def command(batch: Batch) -> str:
    """The shell command of a rank, which srun starts."""
    return (
        f"{python(batch)} -u -m quantexp_launchers.slurm.job rank {shlex.quote(str(batch.folder))}"
    )


def _before(batch: Batch) -> list[str]:
    """The script's lines before the ranks."""
    return [
        "umask 077",
        "trap true TERM  # the lines after the ranks are run even where the scheduler ends the job",
        *first_lines(batch),
        _OWN_JOB,
        f'export {START}="$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}}"',
        f"{_job_step(batch, 'begin')} && begun=0 || begun=$?",
        f"[ $begun -ne {NOTHING_TO_DO} ] || exit 0",
        _requeue_if("begun"),
        "[ $begun -eq 0 ] || exit 1",
    ]


def _after(batch: Batch) -> list[str]:
    """The script's lines after the ranks."""
    return [
        "code=$?",
        "trap '' TERM  # nor are the commands of these lines ended",
        # Without `timeout`, which the signal would end: `job end` itself limits the time to wait for scontrol.
        f"{_job_step(batch, 'end')} $code < <(scontrol show job --oneliner $job) && code=0 || code=$?",
        _requeue_if("code"),
        "[ $code -eq 0 ] || exit 1",
        "exit 0",
    ]


def _requeue_if(variable: str) -> str:
    return f"[ ${variable} -ne {REQUEUE} ] || scontrol requeue $job"


def _job_step(batch: Batch, verb: str) -> str:
    words = ["-m", "quantexp_launchers.slurm.job", verb, str(batch.folder)]
    command = python(batch)
    if arguments := pyxis(batch):
        command = (
            f"{shlex.join(['srun', '--ntasks=1', '--nodes=1', '--overlap', *arguments])} {command}"
        )
    return f"{command} {shlex.join(words)}"


def script(batch: Batch) -> str:
    """The exact script that `submit` sends for this batch."""
    return assembled(batch, command(batch), _before(batch), _after(batch))


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


def check(batch: Batch) -> str | None:
    """`check_script` of a batch."""
    return check_script(script(batch), batch.launcher)


def check_script(text: str, launcher: LauncherConfig) -> str | None:
    """Check with the scheduler that it would accept the script and could start it; submits nothing.

    `--test-only` counts only nodes in service. Where others are out of service, for instance during maintenance, a
    script that needs them passes the check: sbatch itself accepts it, and the job waits for them.

    Returns:
        What a user should know about a script that could not be checked, or None.

    Raises:
        RunError: SLURM is not installed, does not answer, or refuses the script; with SLURM's message.
    """
    require_slurm()
    notice = None
    try:
        _sbatch(["--test-only"], text, launcher)
    except RunError as error:
        nodes = nodes_out_of_service(launcher.partition) if _NO_NODES in str(error) else ""
        if not nodes:
            raise
        notice = f"the job waits for nodes that are out of service: {nodes}"
    check_time(launcher)
    return notice


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


def submit(batch: Batch) -> list[str]:
    """Submit the batch and return the job id of each run: 123_0, 123_1, ..., or 123 for a single run.

    Raises:
        RunError: as `submit_script`.
    """
    job_id = submit_script(script(batch), Submission(batch.folder).script, batch.launcher)
    return ids_of_tasks(job_id, batch.num_tasks)


def ids_of_tasks(job_id: str, num_tasks: int) -> list[str]:
    """The id of each task of a job: 123_0, 123_1, ..., or 123 if there is only one."""
    return [job_id] if num_tasks == 1 else [f"{job_id}_{task}" for task in range(num_tasks)]


def submit_script(text: str, file: Path, launcher: LauncherConfig) -> str:
    """Write the script to a private file, submit it and return the job's id.

    Raises:
        RunError: SLURM refused the script, or did not answer; in the latter case it may have accepted it anyway.
    """
    file.write_text(text)
    file.chmod(0o600)
    answer = _sbatch(["--parsable"], text, launcher)
    job_id = answer.strip().partition(";")[0]  # 123, or 123;cluster
    if not job_id.isdecimal():
        raise RunError(f"sbatch must answer with the job's id, got {answer.strip()!r}")
    return job_id


def _sbatch(arguments: list[str], text: str, launcher: LauncherConfig) -> str:
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


def _environment(launcher: LauncherConfig) -> dict[str, str]:
    """The environment for sbatch, which passes it to the job."""
    defaults = {name for name, key in _DEFAULTS.items() if getattr(launcher, key) is None}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_CONFUSING) or name in _KEPT or name in defaults
    }

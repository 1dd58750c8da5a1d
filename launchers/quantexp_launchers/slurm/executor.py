"""Submits prepared run folders to SLURM, one array for each batch.

submitit writes the options of sbatch and srun into the script. The command there is `quantexp_launchers.slurm.task`, to
which the submission's folder is enough, so nothing is left to do once sbatch has taken the job. Before anything is
submitted, `sbatch --test-only` checks each batch; its error is reported once, without sbatch's prefixes. sbatch's
environment excludes variables that it would read as options or inherit from an enclosing job, and the files it writes
are readable by the user alone. submitit is imported when needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from quantexp.errors import RunError
from quantexp.runs.paths import Submission
from quantexp.schema import LauncherConfig
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.clients import CLIENT_S, ClientError, run_client
from quantexp_launchers.slurm.script import command, parameters
from quantexp_launchers.slurm.states import minutes

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


def script(batch: Batch) -> str:
    """The exact script that `submit` sends for this batch."""
    from submitit.slurm.slurm import _make_sbatch_string

    num_runs = len(batch.runs)
    map_count = num_runs if num_runs > 1 else None
    return str(
        _make_sbatch_string(command(batch), batch.folder, map_count=map_count, **parameters(batch))
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


def check(batch: Batch) -> None:
    """Check with the scheduler that it would accept the batch and could start it; submits nothing.

    Raises:
        RunError: SLURM is not installed, does not answer, or refuses the batch; with SLURM's message.
    """
    require_slurm()
    _sbatch(["--test-only"], script(batch), batch.launcher)
    _check_time(batch.launcher)


def _check_time(launcher: LauncherConfig) -> None:
    """Check the partition's time limit; a cluster without enforced limits accepts a longer job but never starts it.

    Raises:
        RunError: the time limit is longer than the partition's.
    """
    if launcher.qos is not None:  # a QOS may have another limit
        return
    try:
        lines = run_client(["sinfo", "--noheader", "--format=%P %l"]).splitlines()
    except ClientError:
        return
    limits = {name: minutes(limit) for name, _, limit in (line.partition(" ") for line in lines)}
    default = next((name for name in limits if name.endswith("*")), "")
    partitions = launcher.partition or os.environ.get("SBATCH_PARTITION") or default
    requested = [
        limits.get(name, limits.get(f"{name}*")) for name in partitions.rstrip("*").split(",")
    ]
    known = [limit for limit in requested if limit is not None]
    if len(known) == len(requested) and launcher.time_min > max(known):
        raise RunError(
            f"SLURM would never start the job: launcher.time_min must be at most {max(known)} in the partition "
            f"{partitions.rstrip('*')}, got {launcher.time_min}"
        )


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
        RunError: SLURM refused the batch, or did not answer; in the latter case it may have accepted it anyway.
    """
    text = script(batch)
    file = Submission(batch.folder).script
    file.write_text(text)
    file.chmod(0o600)
    answer = _sbatch(["--parsable"], text, batch.launcher)
    job_id = answer.strip().partition(";")[0]  # 123, or 123;cluster
    if not job_id.isdecimal():
        raise RunError(f"sbatch must answer with the job's id, got {answer.strip()!r}")
    if len(batch.runs) == 1:
        return [job_id]
    return [f"{job_id}_{task}" for task in range(len(batch.runs))]


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

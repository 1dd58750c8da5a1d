"""Submits prepared run folders to SLURM with submitit, one array for each batch.

Before anything is submitted, `sbatch --test-only` checks each batch; its error is reported once, without sbatch's
prefixes. The environment of sbatch excludes variables that it would read as options or inherit from an enclosing job,
and the files it writes are readable by the user alone. submitit is imported when needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil

from quantexp.errors import RunError
from quantexp.launch.ledger.clients import ClientError, run_client
from quantexp.launch.ledger.scheduler import minutes
from quantexp.schema import LauncherConfig
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.script import parameters, python
from quantexp_launchers.slurm.task import enter

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

#: Time limit of SLURM's clients, seconds; without a controller they wait for minutes.
CLIENT_TIMEOUT_S = 30
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
    f"the SLURM controller does not answer within {CLIENT_TIMEOUT_S} s; see `scontrol ping` and whether munge runs, "
    "and try again"
)


def script(batch: Batch) -> str:
    """The exact script that `submit` sends for this batch."""
    executor = _executor(batch, is_planned=True)
    if len(batch.runs) > 1:
        executor.parameters["map_count"] = len(batch.runs)
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


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
    try:
        completed = subprocess.run(
            ["sbatch", "--test-only"],
            input=script(batch),
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            env=_environment(batch.launcher),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(_NO_ANSWER) from error
    if completed.returncode:
        raise _refused(completed.stderr, batch.launcher)
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


def _refused(output: str, launcher: LauncherConfig) -> RunError:
    return RunError(f"SLURM refuses the job: {refusal(output)}; {_request(launcher)}")


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
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    runs = [str(run) for run in batch.runs]
    with _submitting(batch.launcher), _given_up("sbatch") as given_up:
        try:
            jobs = _executor(batch).map_array(enter, runs, [batch.umask] * len(runs))
        except (FailedJobError, FailedSubmissionError) as error:
            if given_up.is_set():
                raise RunError(_NO_ANSWER) from error
            raise _refused(str(error), batch.launcher) from error
    return [str(job.job_id) for job in jobs]


@contextlib.contextmanager
def _submitting(launcher: LauncherConfig) -> Iterator[None]:
    """Inside this context files are private, the environment is sbatch's, and its stderr is discarded."""
    before, umask = dict(os.environ), os.umask(0o077)
    os.environ.clear()
    os.environ.update(_environment(launcher, before))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.umask(umask)


def _environment(launcher: LauncherConfig, own: dict[str, str] | None = None) -> dict[str, str]:
    """The environment for sbatch, which passes it to the job."""
    own = dict(os.environ) if own is None else own
    defaults = {name for name, key in _DEFAULTS.items() if getattr(launcher, key) is None}
    return {
        name: value
        for name, value in own.items()
        if not name.startswith(_CONFUSING) or name in _KEPT or name in defaults
    }


@contextlib.contextmanager
def _given_up(client: str) -> Iterator[threading.Event]:
    """Kill a child client after CLIENT_TIMEOUT_S, since submitit would wait forever; yields an event that tells so."""
    given_up = threading.Event()

    def give_up() -> None:
        given_up.set()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.name() == client:
                    child.kill()

    timer = threading.Timer(CLIENT_TIMEOUT_S, give_up)
    timer.start()
    try:
        yield given_up
    finally:
        timer.cancel()


def _executor(batch: Batch, *, is_planned: bool = False) -> SlurmExecutor:
    """Submitit's executor for the batch; for a planned batch it needs no SLURM."""
    from submitit.slurm.slurm import SlurmExecutor

    class Planned(SlurmExecutor):  # type: ignore[misc]
        @classmethod
        def affinity(cls) -> int:
            return 1

    kind = Planned if is_planned else SlurmExecutor
    executor = kind(batch.folder, python=python(batch))
    executor.update_parameters(**parameters(batch))
    return executor

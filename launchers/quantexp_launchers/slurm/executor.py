"""Sends prepared run folders to SLURM with submitit, one array for each batch.

Before anything is sent, sbatch is asked whether it would take each batch; what it says is passed on once, without its
noise. A submission is not confused by variables that sbatch would read as options, or that it would hand on from a job
in which it is called itself, and nobody else can read what it writes.

Hydra executes this module, as any in this folder, in every program that uses Hydra: submitit is imported when needed.
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

#: Seconds that a call of SLURM's clients may take; without a controller they wait for minutes.
CLIENT_TIMEOUT_S = 30
#: Variables that sbatch reads as options (SBATCH_), or that are about the job in which it is called.
_CONFUSING = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")
#: Those that say which cluster is meant.
_KEPT = ("SLURM_CONF", "SLURM_JWT")
#: Defaults of a user, which hold where the configuration says nothing: variable -> the launcher's key.
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
    """The script that `submit` sends for this batch, to the letter."""
    executor = _executor(batch, is_planned=True)
    if len(batch.runs) > 1:
        executor.parameters["map_count"] = len(batch.runs)
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def require_slurm() -> None:
    """Refuse where SLURM's clients are missing.

    Raises:
        RunError: naming the first that is.
    """
    for client in ("sbatch", "srun", "squeue"):
        if shutil.which(client) is None:
            raise RunError(
                f"there is no SLURM here ({client} is not on PATH); submit from a login node, or leave launcher=slurm "
                "out to run on this machine"
            )


def check(batch: Batch) -> None:
    """Ask the scheduler whether it would take the batch and could ever start it; nothing is submitted.

    Raises:
        RunError: there is no SLURM here, it does not answer, or it refuses, in its own words.
    """
    require_slurm()
    try:
        done = subprocess.run(
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
    if done.returncode:
        raise _refused(done.stderr, batch.launcher)
    _check_time(batch.launcher)


def _check_time(launcher: LauncherConfig) -> None:
    """A cluster that does not enforce its limits takes a job over the partition's, and never starts it."""
    if launcher.qos is not None:  # which may have another limit
        return
    try:
        lines = run_client(["sinfo", "--noheader", "--format=%P %l"]).splitlines()
    except ClientError:
        return
    limits = {name: minutes(limit) for name, _, limit in (line.partition(" ") for line in lines)}
    default = next((name for name in limits if name.endswith("*")), "")
    partitions = launcher.partition or os.environ.get("SBATCH_PARTITION") or default
    of_these = [
        limits.get(name, limits.get(f"{name}*")) for name in partitions.rstrip("*").split(",")
    ]
    known = [limit for limit in of_these if limit is not None]
    if len(known) == len(of_these) and launcher.time_min > max(known):
        raise RunError(
            f"SLURM would never start the job: launcher.time_min must be at most {max(known)} in the partition "
            f"{partitions.rstrip('*')}, got {launcher.time_min}"
        )


def _refused(said: str, launcher: LauncherConfig) -> RunError:
    return RunError(f"SLURM refuses the job: {refusal(said)}; {_asked_for(launcher)}")


def refusal(said: str) -> str:
    """The reason among what sbatch prints."""
    reasons = [
        line.removeprefix("sbatch: ")
        .removeprefix("error: ")
        .removeprefix("allocation failure: ")
        .removeprefix("Batch job submission failed: ")
        for line in (line.strip() for line in said.splitlines())
        if line and not line.startswith("Try ")
    ]
    return "; ".join(dict.fromkeys(reasons)) or "it gives no reason"


def _asked_for(launcher: LauncherConfig) -> str:
    """The request in the words of the configuration."""
    keys = [
        *("partition", "account", "qos", "time_min", "nodes", "gpus_per_node", "gpu_type"),
        *("cpus_per_process", "mem_gb", "constraint", "exclude", "nodelist", "reservation"),
        "mail_type",
    ]
    given = {key: getattr(launcher, key) for key in keys}
    given |= {f"sbatch.{name}": value for name, value in launcher.sbatch.items()}
    return "asked for " + ", ".join(
        f"launcher.{key}={value}" for key, value in given.items() if value is not None
    )


def submit(batch: Batch) -> list[str]:
    """Send the batch and return the job's id for each run: 123_0, 123_1, ..., or 123 of a single one.

    Raises:
        RunError: SLURM refused it, or did not answer; in the latter case it may have taken it all the same.
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
    """Files for the user alone, the environment for sbatch, and no words of it beside those in the error."""
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
    """What sbatch is to see of this process's environment, and hand on to the job."""
    own = dict(os.environ) if own is None else own
    defaults = {name for name, key in _DEFAULTS.items() if getattr(launcher, key) is None}
    return {
        name: value
        for name, value in own.items()
        if not name.startswith(_CONFUSING) or name in _KEPT or name in defaults
    }


@contextlib.contextmanager
def _given_up(client: str) -> Iterator[threading.Event]:
    """End a client of ours that takes too long: submitit would wait for it for ever."""
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
    """Submitit's executor for the batch; one that is only planned needs no SLURM here."""
    from submitit.slurm.slurm import SlurmExecutor

    class Planned(SlurmExecutor):  # type: ignore[misc]
        @classmethod
        def affinity(cls) -> int:
            return 1

    kind = Planned if is_planned else SlurmExecutor
    executor = kind(batch.folder, python=python(batch))
    executor.update_parameters(**parameters(batch))
    return executor

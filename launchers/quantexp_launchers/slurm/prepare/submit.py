"""Submits a preparation: an array with a task for each group of inputs, then a job that joins their outputs.

Inputs whose outputs all exist are left out, so that the command resumes after a failure. If one group is left, or none,
there is a single job, which does the whole rest. While jobs of the same preparation are alive, nothing is submitted.

The submitter has PREFIX.partial alone, and writes the submission's name there before it calls sbatch, so that no job is
lost if the submitter is killed. All jobs have that name. If SLURM refuses the second request, the first is cancelled.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from quantexp.data.prepare.groups import balanced
from quantexp.data.prepare.job import Job
from quantexp.data.prepare.listing import unfinished
from quantexp.data.prepare.outputs import writing
from quantexp.data.prepare.partial import PartialFolder, partial_folder, sole_user
from quantexp.errors import ConfigError, RunError
from quantexp.folders import short_path
from quantexp.launch import backend
from quantexp.launch.attempt import root_of
from quantexp.launch.backend import PreparationJobs
from quantexp.launch.preparation import (
    Submitted,
    live_jobs,
    read_submitted,
    refuse_while_jobs_prepare,
    write_submitted,
)
from quantexp.runs.paths import RunsRoot, Submission
from quantexp.runs.snapshot import take_snapshot
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm.check import check_script
from quantexp_launchers.slurm.clients import ClientError, run_client
from quantexp_launchers.slurm.prepare.plan import Plan, submitted_from, write_plan
from quantexp_launchers.slurm.scheduler import require_slurm, submit_script
from quantexp_launchers.slurm.script import first_lines, python, script
from quantexp_launchers.slurm.states import ids_of_tasks
from quantexp_launchers.slurm.submit import check_root, current_umask


@dataclass(frozen=True)
class Tasks:
    """The request of an array, or of one job."""

    folder: Path
    name: str
    launcher: LauncherConfig
    snapshot: Path
    num_tasks: int = 1
    throttle: int | None = None
    dependency: str | None = None


def submit_preparation(experiment: Experiment, job: Job, console: Console) -> PreparationJobs:
    """Submit the jobs that prepare a dataset, or return those that do already.

    `sbatch --test-only` checks the request before anything is written.

    Raises:
        ConfigError: a request that does not fit a preparation, or an invalid paths.root.
        RunError: SLURM is not installed, or refuses a request; nothing was submitted.
        DataError: another process prepares there.
    """
    launcher, root = experiment.launcher, root_of(experiment)
    _refuse(launcher)
    require_slurm()
    check_root(root, [launcher])
    folder = partial_folder(job)
    if (jobs := _submitted_before(folder, launcher)) is not None:
        return jobs
    groups = balanced(job.inputs, unfinished(folder, range(len(job.inputs))))
    groups = groups if len(groups) > 1 and not folder.is_complete() else []
    request = Tasks(RunsRoot(root).submissions / "prepare", "prepare", launcher, root)
    array = replace(request, num_tasks=max(1, len(groups)), throttle=launcher.max_parallel)
    notices = [check_script(script_of(array, "make"), launcher), _about_gpus(launcher)]
    for notice in filter(None, notices):
        console.print(notice, soft_wrap=True, markup=False)
    snapshot = take_snapshot(root)
    with sole_user(folder):
        if (jobs := _submitted_before(folder, launcher)) is not None:
            return jobs
        with writing(folder.root):
            if not folder.is_complete():
                folder.begin()
        before = read_submitted(folder)
        name = f"prepare-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        where = RunsRoot(root).submissions / name
        plan = _plan(experiment, job, groups, snapshot)
        _write(plan, where)
        write_submitted(folder, Submitted(launcher.kind, name, str(where), job.hash))
        try:
            jobs = _send(replace(array, folder=where, name=name, snapshot=snapshot), plan)
        except BaseException:
            with contextlib.suppress(ClientError):
                run_client(["scancel", "--quiet", f"--name={name}"])
            raise
    return replace(jobs, earlier=_folder_of(before, job))


def script_of(request: Tasks, verb: str) -> str:
    """The script whose tasks run `quantexp_launchers.slurm.prepare.job VERB`; it exits only with 0 or 1."""
    module = "quantexp_launchers.slurm.prepare.job"
    command = f"{python(request)} -u -m {module} {verb} {shlex.quote(str(request.folder))}"
    return script(
        request, command, ["umask 077", *first_lines(request)], ["[ $? -eq 0 ] || exit 1"]
    )


def _refuse(launcher: LauncherConfig) -> None:
    if launcher.num_processes != 1:
        raise ConfigError(
            f"launcher.num_processes must be 1 for a preparation, got {launcher.num_processes}; "
            "launcher.cpus_per_process is the number of processes that tokenise in each task"
        )


def _about_gpus(launcher: LauncherConfig) -> str | None:
    if not launcher.gpus_per_node:
        return None
    return "each task asks for a GPU, which a preparation does not use: launcher.gpus_per_node=0"


def _submitted_before(folder: PartialFolder, launcher: LauncherConfig) -> PreparationJobs | None:
    """The live jobs of the same preparation; None if there are none.

    Raises:
        RunError: jobs of another preparation are alive, or SLURM does not answer.
    """
    submitted = read_submitted(folder)
    if submitted is None:
        return None
    if (submitted.job, submitted.launcher) != (folder.job, launcher.kind):
        refuse_while_jobs_prepare(folder)
        return None
    jobs = live_jobs(submitted)
    return _answer(Path(submitted.folder), jobs, []) if jobs else None


def _folder_of(submitted: Submitted | None, job: Job) -> Path | None:
    """The folder of a submission of this preparation, if it still exists."""
    if submitted is None or submitted.job != job.hash or not Path(submitted.folder).is_dir():
        return None
    return Path(submitted.folder)


def _plan(experiment: Experiment, job: Job, groups: list[list[int]], snapshot: Path) -> Plan:
    return Plan(
        dataset=experiment.dataset,
        force=experiment.force,
        inputs=job.inputs,
        groups=groups,
        job=job.hash,
        directory=submitted_from(),
        snapshot=str(snapshot),
        umask=current_umask(),
        max_requeue=experiment.launcher.max_requeue,
        cpus_per_process=experiment.launcher.cpus_per_process,
    )


def _write(plan: Plan, where: Path) -> None:
    try:
        where.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        where.mkdir(mode=0o700)
        write_plan(plan, Submission(where))
    except OSError as error:
        raise RunError(
            f"{where} cannot be written: {error.strerror}; set paths.root to a folder that can"
        ) from error


def _send(array: Tasks, plan: Plan) -> PreparationJobs:
    """Submit the array and the job that joins, or the single job."""
    files, groups = Submission(array.folder), plan.groups
    if not groups:
        job_id = submit_script(script_of(array, "join"), files.script, array.launcher)
        return _answer(array.folder, _waiting([job_id]), [f"job {job_id}"])
    job_id = submit_script(script_of(array, "make"), files.script, array.launcher)
    join = replace(array, num_tasks=1, throttle=None, dependency=f"afterok:{job_id}")
    join_id = submit_script(script_of(join, "join"), files.join_script, join.launcher)
    num_inputs, total = sum(map(len, groups)), len(plan.inputs)
    files_made = (
        f"{num_inputs} input files"
        if num_inputs == total
        else f"{num_inputs} of {total} input files"
    )
    words = f"{len(groups)} tasks as the array {job_id}, for {files_made}"
    if array.throttle is not None and array.throttle < len(groups):
        words += f", at most {array.throttle} at a time"
    submitted = [words, f"job {join_id}, which joins their outputs after the last of them"]
    ids = [*ids_of_tasks(job_id, len(groups)), join_id]
    return _answer(array.folder, _waiting(ids), submitted)


def _waiting(ids: Sequence[str]) -> list[backend.Job]:
    return [backend.Job(job_id, "waiting", is_waiting=True) for job_id in ids]


def _answer(where: Path, jobs: list[backend.Job], submitted: list[str]) -> PreparationJobs:
    logs = shlex.quote(str(short_path(where)))
    follow = [f"squeue --name={where.name}", f"tail -n 1 {logs}/*.err"]
    return PreparationJobs(jobs, submitted, where, follow, f"scancel --name={where.name}")

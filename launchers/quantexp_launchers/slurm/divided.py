"""Submits work beside training: an array with a task for each group of parts, then a job that joins their results.

Parts whose partial results exist are left out, so that the command resumes after a failure. If one group is left, or
none, there is a single job, which does the whole rest; work without parts is always one. While jobs of the same work
are alive, nothing is submitted.

The submitter has RESULT.partial alone, and writes the submission's name there before it calls sbatch, so that no job is
lost if the submitter is killed. All jobs have that name. If SLURM refuses the second request, the first is cancelled.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from rich.console import Console

from quantexp.errors import ConfigError, RunError
from quantexp.folders import for_shell
from quantexp.launch import backend
from quantexp.launch.backend import DividedJobs, DividedWork
from quantexp.launch.divided_work import (
    Submitted,
    live_jobs,
    read_submitted,
    refuse_while_jobs_work,
    write_submitted,
)
from quantexp.launch.recorded import root_of
from quantexp.runs.paths import RunsRoot, Submission
from quantexp.runs.snapshot import take_snapshot
from quantexp.runs.status import write_json
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm.check import check_script
from quantexp_launchers.slurm.clients import ClientError, run_client
from quantexp_launchers.slurm.divided_job import Plan, read_plan
from quantexp_launchers.slurm.scheduler import max_array_size, require_slurm, submit_script
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


def submit_divided(work: DividedWork, experiment: Experiment, console: Console) -> DividedJobs:
    """Submit the jobs that do the work, or return those that do already.

    `sbatch --test-only` checks the request before anything is written.

    Raises:
        ConfigError: a request that does not fit divided work, or an invalid paths.root.
        RunError: SLURM is not installed, or refuses a request; nothing was submitted.
        QuantexpError: another process works there, or the folder of the result cannot be written.
    """
    launcher, root = experiment.launcher, root_of(experiment)
    _refuse(launcher, work)
    require_slurm()
    check_root(root, [launcher])
    if (jobs := _submitted_before(work, launcher)) is not None:
        return jobs
    groups = _tasks_of(work)
    request = Tasks(RunsRoot(root).submissions / work.verb, work.verb, launcher, root)
    array = replace(request, num_tasks=max(1, len(groups)), throttle=launcher.max_parallel)
    notices = [check_script(script_of(array), launcher), _about_gpus(launcher, work)]
    for notice in filter(None, notices):
        console.print(notice, soft_wrap=True, markup=False)
    snapshot = take_snapshot(root)
    with work.folder.alone():
        if (jobs := _submitted_before(work, launcher)) is not None:
            return jobs
        with work.folder.writing():
            work.folder.begin()
        before = read_submitted(work.folder)
        name = f"{work.verb}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        array = replace(
            array, folder=RunsRoot(root).submissions / name, name=name, snapshot=snapshot
        )
        _write_plan(work, array, groups)
        submitted = Submitted(launcher.kind, name, str(array.folder), work.folder.job)
        write_submitted(work.folder, submitted)
        try:
            jobs = _send(array, groups, work)
        except BaseException:
            with contextlib.suppress(ClientError):
                run_client(["scancel", "--quiet", f"--name={name}"])
            raise
    return _with_earlier(jobs, before)


def script_of(request: Tasks) -> str:
    """The script whose tasks run `quantexp_launchers.slurm.divided_job`; it exits only with 0 or 1."""
    module = "quantexp_launchers.slurm.divided_job"
    command = f"{python(request)} -u -m {module} {shlex.quote(str(request.folder))}"
    return script(
        request, command, ["umask 077", *first_lines(request)], ["[ $? -eq 0 ] || exit 1"]
    )


def _refuse(launcher: LauncherConfig, work: DividedWork) -> None:
    if launcher.num_processes != 1:
        raise ConfigError(
            f"launcher.num_processes must be 1 for quantexp {work.verb}, got {launcher.num_processes}; "
            "launcher.cpus_per_process is the number of processes that work in each task"
        )


def _about_gpus(launcher: LauncherConfig, work: DividedWork) -> str | None:
    if not launcher.gpus_per_node:
        return None
    return f"each task asks for a GPU, which quantexp {work.verb} does not use: launcher.gpus_per_node=0"


def _submitted_before(work: DividedWork, launcher: LauncherConfig) -> DividedJobs | None:
    """The live jobs of the same work; None if there are none.

    Raises:
        RunError: jobs of other work are alive, or SLURM does not answer.
    """
    submitted = read_submitted(work.folder)
    if submitted is None:
        return None
    if (submitted.job, submitted.launcher) != (work.folder.job, launcher.kind):
        refuse_while_jobs_work(work.folder)
        return None
    jobs = live_jobs(submitted)
    return _answer(work, Path(submitted.folder), jobs, []) if jobs else None


def _tasks_of(work: DividedWork) -> list[list[int]]:
    """The parts of each task, of as many tasks as the cluster allows; empty for a single job."""
    groups = [list(group) for group in work.groups]
    if len(groups) < 2:
        return []
    most = max_array_size()
    if len(groups) <= most:
        return groups
    return [sorted(chain(*groups[task::most])) for task in range(most)]


def _write_plan(work: DividedWork, array: Tasks, groups: list[list[int]]) -> None:
    """Write the plan, and what its commands read, to private files."""
    files, command = Submission(array.folder), list(work.command)
    contents: dict[Path, object] = {}
    if work.content is not None:
        contents[files.work] = work.content
        command.append(str(files.work))
    plan = Plan(
        verb=work.verb,
        command=command,
        groups=groups,
        again=work.again,
        directory=str(Path.cwd()),
        snapshot=str(array.snapshot),
        umask=current_umask(),
        max_requeue=array.launcher.max_requeue,
        cpus_per_process=array.launcher.cpus_per_process,
    )
    contents[files.plan] = asdict(plan)
    try:
        files.root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.root.mkdir(mode=0o700)
        for file, content in contents.items():
            write_json(file, content)
            file.chmod(0o600)
    except OSError as error:
        raise RunError(
            f"{files.root} cannot be written: {error.strerror}; set paths.root to a folder that can"
        ) from error


def _send(array: Tasks, groups: list[list[int]], work: DividedWork) -> DividedJobs:
    """Submit the array and the job that joins, or the single job."""
    files = Submission(array.folder)
    job_id = submit_script(script_of(array), files.script, array.launcher)
    if not groups:
        return _answer(work, array.folder, _waiting([job_id]), [f"job {job_id}"])
    join = replace(array, num_tasks=1, throttle=None, dependency=f"afterok:{job_id}")
    join_id = submit_script(script_of(join), files.join_script, join.launcher)
    number = sum(map(len, groups))
    among = "" if number == work.num_parts else f"of {work.num_parts} "
    words = f"{len(groups)} tasks as the array {job_id}, for {number} {among}{work.parts}"
    if array.throttle is not None and array.throttle < len(groups):
        words += f", at most {array.throttle} at a time"
    submitted = [words, f"job {join_id}, which joins their outputs after the last of them"]
    ids = [*ids_of_tasks(job_id, len(groups)), join_id]
    return _answer(work, array.folder, _waiting(ids), submitted)


def _waiting(ids: Sequence[str]) -> list[backend.Job]:
    return [backend.Job(job_id, "waiting", is_waiting=True) for job_id in ids]


def _answer(
    work: DividedWork, where: Path, jobs: list[backend.Job], submitted: list[str]
) -> DividedJobs:
    logs = for_shell(where)
    follow = [f"squeue --name={where.name}", f"tail -n 1 {logs}/*.err"]
    return DividedJobs(work, jobs, submitted, where, follow, f"scancel --name={where.name}")


def _with_earlier(jobs: DividedJobs, before: Submitted | None) -> DividedJobs:
    """The jobs, with the submission of the same work before them, if its folder still exists."""
    work = jobs.work
    if before is None or before.job != work.folder.job or not Path(before.folder).is_dir():
        return jobs
    folder = Path(before.folder)
    return replace(jobs, earlier=folder, unfinished=tuple(_unfinished(folder, work)))


def _unfinished(folder: Path, work: DividedWork) -> list[Path]:
    """The output of the unfinished tasks that started; of the last job, if all tasks finished.

    A task is unfinished if a part of its group still has no partial result, whatever ended it: nobody asks SLURM, which
    may have forgotten the task.
    """
    try:
        groups = read_plan(Submission(folder)).groups
    except RunError:
        return []
    left = set(chain(*work.groups))
    tasks = [task for task, group in enumerate(groups) if not left.isdisjoint(group)]
    # %A_%a_0_log.err of a task, %j_0_log.err of a job
    patterns = [f"*_{task}_0_log.err" for task in tasks] or ["[0-9]*_0_log.err"]
    logs = (sorted(folder.glob(pattern)) for pattern in patterns)
    return [log for each in logs for log in each if tasks or log.name.count("_") == 2]

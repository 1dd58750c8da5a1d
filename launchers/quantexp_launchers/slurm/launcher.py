"""The launcher `slurm`: jobs of a SLURM cluster, submitted and not waited for.

A run is alive while its job is. A run that its job ended could not record that. Its standing then follows from the job,
by the table in `ends`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console

from quantexp.errors import RunError
from quantexp.launch.backend import (
    OPEN,
    DividedJobs,
    DividedWork,
    Job,
    Launcher,
    LaunchPlan,
    Point,
    Standing,
    has_recorded_end,
    reread,
)
from quantexp.model.checkpoints import next_iteration
from quantexp.runs.lock import is_locked
from quantexp.runs.paths import RunDir, RunsRoot, Submission
from quantexp.runs.ranks import log_end
from quantexp.runs.recorded_config import is_same_folder
from quantexp.runs.status import State, Status, end_of, instant
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm import scheduler
from quantexp_launchers.slurm.check import check_request
from quantexp_launchers.slurm.clients import ClientError
from quantexp_launchers.slurm.ends import progress, run_end
from quantexp_launchers.slurm.states import JobState, SlurmJob, describe, waits

#: SLURM's reason of a job that waits for one that failed.
_NEVER = "DependencyNeverSatisfied"
#: The longest time between writing a run's status and receiving SLURM's job id.
SUBMISSION = timedelta(seconds=120)


class SlurmLauncher(Launcher):
    """Submits the points as job arrays, one for each distinct request; the schema has its keys (`SlurmConfig`)."""

    def check(self, launcher: LauncherConfig) -> None:
        """Refuse a request that contradicts itself, or that sets what quantexp sets."""
        super().check(launcher)
        check_request(launcher)

    def submit(self, points: Sequence[Point], console: Console, *, is_sweep: bool) -> int:
        """Submit the points and print how to follow and stop them."""
        from quantexp_launchers.slurm.submit import submit_run, submit_sweep

        if is_sweep:
            return submit_sweep(list(points), console)
        ((experiment, _),) = points
        return submit_run(experiment, console)

    def standings(self, runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
        """The standing of each run, from squeue and sacct."""
        return standings(runs)

    def cancel(self, standings: Sequence[Standing]) -> dict[Path, str | None]:
        """Cancel the jobs by scancel."""
        return cancel(standings)

    def kill(self, standings: Sequence[Standing], reason: str) -> None:
        """Kill the jobs' scripts and ranks."""
        scheduler.kill([s.job.id for s in standings if s.job is not None])

    def logs(self, standing: Standing) -> list[Path]:
        """The output of the job's script."""
        job_id = standing.job.id if standing.job is not None else None
        return job_logs(standing.run, standing.status, job_id)

    def live_job(self, run: RunDir, status: Status) -> str | None:
        """The pending or running job of a run; queries squeue alone."""
        return live_job(run, status)

    def divide(self, work: DividedWork, experiment: Experiment, console: Console) -> DividedJobs:
        """Submit work beside training: in parts as an array and a job that joins their results, or as one job."""
        from quantexp_launchers.slurm.divided import submit_divided

        return submit_divided(work, experiment, console)

    def jobs_named(self, name: str) -> list[Job]:
        """The live jobs with this name; a job whose dependency failed never starts, and SLURM is about to cancel it."""
        jobs = scheduler.jobs_named(name, past=False).values()
        return [_reported(job) for job in jobs if job.alive and job.reason != _NEVER]

    def plan(self, experiment: Experiment, folder: Path) -> LaunchPlan:
        """The batch script; needs no SLURM."""
        from quantexp_launchers.slurm.script import run_script
        from quantexp_launchers.slurm.submit import planned

        batch = planned(experiment, folder)
        command = ["sbatch", str(Submission(batch.folder).script)]
        return LaunchPlan(command, script=run_script(batch))


def standings(runs: Sequence[tuple[RunDir, Status]]) -> list[Standing]:
    """The standing of each run, with one query for all; if SLURM does not answer, `note` has the error.

    Without an answer of accounting, the jobs that the controller does not know have ended, but nobody knows how.
    """
    statuses, accounting = [_own(run, status) for run, status in runs], None
    note = None
    jobs: list[SlurmJob | None] = [None] * len(runs)
    try:
        try:
            jobs = jobs_of(statuses)
        except ClientError as error:
            if error.client != "sacct":
                raise
            accounting = f"how its job ended is not known: {error}"
            jobs = jobs_of(statuses, past=False)
    except ClientError as error:
        note = f"its job was not queried: {error}"
    standings = [
        replace(
            _of_copy(run, status, original)
            if (original := original_of(run, status)) and status.state in OPEN
            else _standing(run, status, job, note),
            job=None if job is None else _reported(job),
        )
        for (run, status), job in zip(runs, jobs, strict=True)
    ]
    if accounting is None:
        return standings
    return [
        replace(each, sure=False, note=accounting)
        if each.is_unrecorded_end and each.job is None
        else each
        for each in standings
    ]


def original_of(run: RunDir, status: Status) -> Path | None:
    """The folder that the run's job writes, if `run` is a copy of it; None for the folder itself, moved or not."""
    original = Path(status.folder) if status.folder is not None else None
    if original is None or not RunDir(original).status.is_file():
        return None
    return None if is_same_folder(original, run.root) else original


def _own(run: RunDir, status: Status) -> Status:
    """The status without the job of another folder."""
    if original_of(run, status) is None:
        return status
    return replace(status, job_id=None, submission=None, task=None)


def _of_copy(run: RunDir, status: Status, original: Path) -> Standing:
    job = f"job {status.job_id}" if status.job_id else f"the submission {status.submission}"
    reason = f"a copy of {original}, to which {job} belongs"
    return Standing(run, State.PREEMPTED, False, reason, status=status)


def live_job(run: RunDir, status: Status) -> str | None:
    """A text such as `job 123_4 is waiting (Resources)` if the run's job is alive; None otherwise.

    Raises:
        ClientError: SLURM is not installed or does not answer, and the run, which has a job, has not ended.
    """
    try:
        (job,) = jobs_of([_own(run, status)], past=False)
    except ClientError:
        if status.state in OPEN and (status.job_id or status.submission):
            raise
        return None
    return f"job {job.id} is {describe(job)}" if job is not None and job.alive else None


def cancel(standings: Sequence[Standing]) -> dict[Path, str | None]:
    """Cancel the jobs in one call; for each run None, or why it has no job to cancel."""
    answers: dict[Path, str | None] = {
        s.run.root: s.note or f"{s.where}; try again"
        for s in standings
        if s.job is None and s.alive
    }
    ids = {s.run.root: s.job.id for s in standings if s.job is not None}
    try:
        scheduler.cancel(list(ids.values()))
    except RunError as error:
        return answers | dict.fromkeys(ids, str(error))
    return answers | dict.fromkeys(ids)


def jobs_of(statuses: Sequence[Status], *, past: bool = True) -> list[SlurmJob | None]:
    """The job of each status, with one query for all job ids; None if the run has no job or no one knows the job.

    A status without a job id, because its submission died before writing it, is searched by the submission's name. A
    job with the right id but another name is a different job: a reinstalled SLURM restarts its numbering. Jobs that
    ended more than a few minutes ago are queried only if `past`, and only for runs that have not recorded their end.

    Raises:
        ClientError: SLURM is not installed, or does not answer.
    """
    ids = {status.job_id for status in statuses if status.job_id is not None}
    unrecorded = {s.job_id for s in statuses if s.job_id is not None and not has_recorded_end(s)}
    by_id = scheduler.jobs(ids, unrecorded if past else ()) if ids else {}
    names = {s.submission: s for s in statuses if s.submission and s.job_id is None}
    by_name = {
        name: scheduler.jobs_named(name, _since(status), past=past)
        for name, status in names.items()
    }
    return [_job_of(status, by_id, by_name) for status in statuses]


def _job_of(
    status: Status,
    by_id: dict[str, SlurmJob],
    by_name: dict[str, dict[int | None, SlurmJob]],
) -> SlurmJob | None:
    if status.job_id is None:
        tasks = by_name.get(status.submission or "", {})
        return tasks.get(status.task) or tasks.get(None)
    job = by_id.get(status.job_id)
    if job is None or (status.submission and job.name != status.submission):
        return None
    return job


def _since(status: Status) -> datetime | None:
    return instant(status.created) if status.created else None


def _reported(job: SlurmJob) -> Job:
    return Job(job.id, describe(job), waits(job), job.restarts, job.ended)


def _standing(run: RunDir, status: Status, job: SlurmJob | None, note: str | None) -> Standing:
    if note is not None and status.state in OPEN:
        alive = status.state is not State.PREEMPTED
        where = f"job {status.job_id}" if status.job_id else ""
        return Standing(run, status.state, alive, status.reason, where, note, status)
    is_requeued = job is not None and job.restarts > 0 and waits(job)
    if job is not None and job.alive and (not has_recorded_end(status) or is_requeued):
        return _of_live_job(run, status, job)
    status = reread(run, status)
    if job is None and status.state in OPEN:
        return _of_lost_job(run, status)
    state, reason = status.state, status.reason
    if job is not None and not job.alive and not has_recorded_end(status):
        state, reason = end_of(status, *_end(run, status, job))
    return Standing(run, state, False, reason, status=status)


def _of_live_job(run: RunDir, status: Status, job: SlurmJob) -> Standing:
    """The standing of a run with a live job; a requeued run may have recorded the requeue as a cancellation."""
    where = f"job {job.id} {describe(job)}"
    if not waits(job):
        reason = status.reason if status.state is State.RUNNING else ""
        return Standing(run, State.RUNNING, True, reason, where, status=status)
    is_requeue = job.restarts or status.state is not State.PENDING
    reason = f"requeued ({_requeue_reason(status)})" if is_requeue else status.reason
    return Standing(run, State.PENDING, True, reason, where, status=status)


def _requeue_reason(status: Status) -> str:
    reason = status.reason or (status.restarts[-1].get("reason") if status.restarts else None)
    return str(reason or "by the scheduler")


def _of_lost_job(run: RunDir, status: Status) -> Standing:
    """The standing of a run whose job is unknown: it is being submitted, or its job is lost."""
    if is_locked(run) or _being_submitted(status):
        where = "being submitted"
        if status.started is not None:
            where = f"{status.host}, process {status.pid}" if status.pid else f"{status.host}"
        return Standing(run, status.state, True, status.reason, where, status=status)
    began = _began(run, status)
    state, reason = end_of(status, *_lost(status, began=began))
    return Standing(run, state, False, reason, status=status, sure=began)


def _lost(status: Status, *, began: bool) -> tuple[State, str]:
    """The state and reason of a run whose job the scheduler does not know."""
    if status.state is State.PREEMPTED:
        return status.state, status.reason
    if status.job_id is None:
        return State.PREEMPTED, "its submission ended before SLURM had taken the job"
    job = f"the scheduler no longer knows job {status.job_id}"
    if began:
        return State.PREEMPTED, f"{job}, and the run did not record its end, at {progress(status)}"
    return State.CANCELLED, f"{job}, which never started: cancelled there"


def _being_submitted(status: Status) -> bool:
    if status.job_id is not None or status.updated is None:
        return False
    return datetime.now(UTC) - instant(status.updated) < SUBMISSION


def _began(run: RunDir, status: Status) -> bool:
    """Whether a submitted run's job has ever started."""
    has_started = status.state is not State.PENDING or status.started is not None
    return has_started or any(os.access(file, os.R_OK) for file in job_logs(run, status))


def _end(run: RunDir, status: Status, job: SlurmJob) -> tuple[State, str]:
    """The end of a run by its job; a recorded preemption, or a signal that SLURM did not send, takes precedence."""
    by_itself = job.state in (JobState.COMPLETED, JobState.FAILED)
    if status.state is State.PREEMPTED and job.state is not JobState.CANCELLED:
        return status.state, status.reason
    if status.state is State.CANCELLED and by_itself:
        return status.state, status.reason
    state, reason = run_end(job, status, first=next_iteration(run))
    return state, f"{reason}; {_end_of_log(run, status, job)}" if state is State.FAILED else reason


def job_logs(run: RunDir, status: Status, job_id: str | None = None) -> list[Path]:
    """The files that hold the output of the run's job; empty without a job."""
    number = job_id or status.job_id
    if status.submission is None or number is None:
        return []
    folder = RunsRoot(run.root.parent).submissions / status.submission
    return [folder / f"{number}_0_log.{end}" for end in ("out", "err")]


def _end_of_log(run: RunDir, status: Status, job: SlurmJob) -> str:
    """The end of the run's log, or of its job's output."""
    if os.access(run.rank_log(0), os.R_OK):  # not so if the logs are another user's
        return log_end(run.rank_log(0))
    logs = [
        log
        for log in job_logs(run, status, job.id)
        if os.access(log, os.R_OK) and log.stat().st_size
    ]
    return log_end(logs[-1]) if logs else "it left no log"

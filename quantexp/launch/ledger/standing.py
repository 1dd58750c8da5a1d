"""The standing of a run: its actual state now, from its folder, its lock and the scheduler.

status.json holds what a run recorded last. A run that was killed, or whose job was ended, could not record that, so its
lock and its job count too. A local run is alive while its lock is held (or, on disks without visible locks, while its
process exists); a SLURM run is alive while its job is. This module only reads; `settle` writes.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from quantexp.errors import RunError
from quantexp.launch.ledger.assigned import OPEN, has_recorded_end, jobs_of
from quantexp.launch.ledger.clients import ClientError
from quantexp.launch.ledger.job import Job, JobState, describe
from quantexp.launch.ledger.owner import is_worker
from quantexp.launch.ledger.pace import Pace, pace
from quantexp.launch.ledger.verdict import Verdict, began, of_job, of_lost_job, of_lost_process
from quantexp.launch.ledger.waiting import waiting_in
from quantexp.runs.lock import is_locked
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status

#: The longest time between writing a run's status and receiving SLURM's job id.
SUBMISSION = timedelta(seconds=120)
#: How old the status of a live run on another machine, whose locks may be invisible here, may be.
SILENCE = timedelta(minutes=15)
#: The reason of a run whose configuration was deleted: no command can use it.
BROKEN = "broken: its config.yaml is gone; restore it, or delete the folder"
#: The reason of a pending run that is in no live sweep.
NOT_SCHEDULED = "prepared, but no process starts it; quantexp resume does"


@dataclass(frozen=True)
class Standing:
    """The actual state of a run."""

    run: RunDir
    #: None if the status is missing or broken.
    state: State | None
    #: Whether the run waits, runs, or will be requeued by the scheduler.
    alive: bool = False
    #: Why the run ended, or was requeued.
    reason: str = ""
    #: `here, process 123`, `job 123_4 running on n1`, `job 123_4 waiting (Resources)`; empty after the end.
    where: str = ""
    #: A warning about information that is not available.
    note: str | None = None
    #: The content of status.json.
    status: Status = field(default_factory=Status)
    job: Job | None = None
    pace: Pace = field(default_factory=Pace)
    #: False if the run may still be alive: this cluster does not know the jobs of another one.
    sure: bool = True

    @property
    def is_unrecorded_end(self) -> bool:
        """Whether the run has certainly ended with a state or reason that status.json does not have."""
        ended = self.state is not None and self.state not in (State.PENDING, State.RUNNING)
        recorded = (self.status.state, self.status.reason)
        return ended and self.sure and (self.state, self.reason) != recorded


def standing(run: RunDir) -> Standing:
    """The standing of one run."""
    return standings([run])[0]


def standings(runs: Sequence[RunDir]) -> list[Standing]:
    """The standing of each run, with one query to the scheduler; if it does not answer, `note` has the error."""
    recorded = [_read(run) for run in runs]
    statuses = [s for s in recorded if isinstance(s, Status) and s.state is not State.COMPLETED]
    note = None
    try:
        jobs = dict(zip(map(id, statuses), jobs_of(statuses), strict=True))
    except ClientError as error:
        jobs, note = {}, f"its job was not queried: {error}"
    current = [
        _standing(run, status, jobs.get(id(status)), note)
        if isinstance(status, Status)
        else Standing(run, None, reason=status)
        for run, status in zip(runs, recorded, strict=True)
    ]
    return _with_sweeps(current)


def _read(run: RunDir) -> Status | str:
    """The status of a run, or why there is none."""
    try:
        status = read_status(run.status)
    except RunError as error:
        return str(error).replace(f"{run.root}/", "")  # the table shows the run's name
    return status or "it has no status.json: it was never started"


def _standing(run: RunDir, status: Status, job: Job | None, note: str | None) -> Standing:
    if status.submission is not None or status.job_id is not None:
        current = _of_submitted(run, status, job, note)
    else:
        current = _of_local(run, status)
    current = replace(current, job=job, pace=pace(run, current.status))
    if current.alive or run.config.is_file():
        return current
    return replace(current, state=None, reason=BROKEN, where="")


def _of_local(run: RunDir, status: Status) -> Standing:
    if status.state not in (State.PENDING, State.RUNNING):
        return Standing(run, status.state, False, status.reason, status=status)
    if is_locked(run) or _may_live(status):
        return Standing(run, status.state, True, status.reason, _process(status), status=status)
    status = _reread(run, status)  # the run may have ended since the first read
    if status.state is State.RUNNING and not is_locked(run):
        state, reason = of_lost_process(status)
        return Standing(run, state, False, reason, status=status)
    return Standing(run, status.state, False, status.reason, status=status)


def _with_sweeps(current: list[Standing]) -> list[Standing]:
    """Add to each pending local run the sweep that will start it, or that there is none."""
    pending = [s for s in current if s.state is State.PENDING and not s.alive]
    sweeps = {root: waiting_in(root) for root in {s.run.root.parent for s in pending}}

    def with_sweep(standing: Standing) -> Standing:
        if not (standing.state is State.PENDING and not standing.alive):
            return standing
        sweep = sweeps[standing.run.root.parent].get(standing.run.root.name)
        if sweep is None:
            return replace(standing, reason=standing.reason or NOT_SCHEDULED)
        return replace(standing, alive=True, where=f"waiting in sweep {sweep}")

    return [with_sweep(standing) for standing in current]


def _may_live(status: Status) -> bool:
    """Whether a run without a visible lock may still run: not every disk shows locks of other machines."""
    if status.state is not State.RUNNING:
        return False
    if status.host == platform.node():
        return status.pid is not None and is_worker(status.pid)
    return _age(status.updated) < SILENCE


def _process(status: Status) -> str:
    where = "here" if status.host == platform.node() else str(status.host)
    return f"{where}, process {status.pid}" if status.pid else f"{where}, starting"


def _of_submitted(run: RunDir, status: Status, job: Job | None, note: str | None) -> Standing:
    if note is not None and status.state in OPEN:
        alive = status.state is not State.PREEMPTED
        where = f"job {status.job_id}" if status.job_id else ""
        return Standing(run, status.state, alive, status.reason, where, note, status)
    if job is not None and job.alive and (not has_recorded_end(status) or _is_requeued(job)):
        return _of_live_job(run, status, job)
    status = _reread(run, status)  # the run may have ended between the first read and the query
    if job is None and status.state in OPEN:
        return _of_lost(run, status)
    state, reason = status.state, status.reason
    if job is not None and not job.alive and not has_recorded_end(status):
        state, reason = _end(run, status, job)
    return Standing(run, state, False, reason, status=status)


def _of_lost(run: RunDir, status: Status) -> Standing:
    """The standing of a run whose job is unknown: it is being submitted, or its job is lost."""
    if is_locked(run) or _being_submitted(status):
        where = "being submitted" if status.started is None else _process(status)
        return Standing(run, status.state, True, status.reason, where, status=status)
    is_recorded = status.state is State.PREEMPTED
    state, reason = (status.state, status.reason) if is_recorded else of_lost_job(run, status)
    return Standing(run, state, False, reason, status=status, sure=began(run, status))


def _end(run: RunDir, status: Status, job: Job) -> Verdict:
    """The end of a run by its job; a recorded preemption, or a signal that SLURM did not send, takes precedence."""
    by_itself = job.state in (JobState.COMPLETED, JobState.FAILED)
    if status.state is State.PREEMPTED and job.state is not JobState.CANCELLED:
        return status.state, status.reason
    if status.state is State.CANCELLED and by_itself:
        return status.state, status.reason
    return of_job(run, status, job)


def _is_requeued(job: Job) -> bool:
    return job.restarts > 0 and job.state in (JobState.PENDING, JobState.REQUEUED)


def _of_live_job(run: RunDir, status: Status, job: Job) -> Standing:
    """The standing of a run with a live job; a requeued run may have recorded the requeue as a cancellation."""
    where = f"job {job.id} {describe(job)}"
    if job.state not in (JobState.PENDING, JobState.REQUEUED):
        reason = status.reason if status.state is State.RUNNING else ""
        return Standing(run, State.RUNNING, True, reason, where, status=status)
    is_requeue = job.restarts or status.state is not State.PENDING
    reason = f"requeued ({_requeue_reason(status)})" if is_requeue else status.reason
    return Standing(run, State.PENDING, True, reason, where, status=status)


def _requeue_reason(status: Status) -> str:
    reason = status.reason or (status.restarts[-1].get("reason") if status.restarts else None)
    return str(reason or "by the scheduler")


def _being_submitted(status: Status) -> bool:
    return status.job_id is None and _age(status.updated) < SUBMISSION


def _age(time: str | None) -> timedelta:
    return timedelta.max if time is None else datetime.now(UTC) - datetime.fromisoformat(time)


def _reread(run: RunDir, status: Status) -> Status:
    current = _read(run)
    return current if isinstance(current, Status) else status


def live_job(status: Status) -> str | None:
    """A text such as `job 123_4 is waiting (Resources)` if the run's job is alive; None otherwise.

    Raises:
        ClientError: as `live_jobs`.
    """
    return live_jobs([status])[0]


def live_jobs(statuses: Sequence[Status]) -> list[str | None]:
    """`live_job` of each status, with one query to the scheduler; no query if no run has a job.

    Raises:
        ClientError: SLURM is not installed or does not answer, and a run that has not ended has a job.
    """
    try:
        jobs = jobs_of(statuses, past=False)
    except ClientError:
        if any(s.state in OPEN and (s.job_id or s.submission) for s in statuses):
            raise
        return [None] * len(statuses)
    return [f"job {job.id} is {describe(job)}" if job and job.alive else None for job in jobs]

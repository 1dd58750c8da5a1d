"""What is true of a run now, from its folder, its lock and the scheduler.

status.json is what a run said last. A run that was killed, or whose job was ended, could not say so; here its lock and
its job are looked at too. A local run is alive while its lock is held (or, where no lock can be looked at, while its
process is there); a SLURM run while its job is. Nothing is written here: `settle` does that.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from quantexp.errors import RunError
from quantexp.launch.ledger.assigned import OPEN, has_told, jobs_of
from quantexp.launch.ledger.clients import ClientError
from quantexp.launch.ledger.job import Job, JobState, doing
from quantexp.launch.ledger.owner import is_worker
from quantexp.launch.ledger.pace import Pace, pace
from quantexp.launch.ledger.verdict import Verdict, began, of_job, of_lost_job, of_lost_process
from quantexp.launch.ledger.waiting import waiting_in
from quantexp.runs.lock import is_locked
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status

#: How long a submission may take from a run's status to SLURM's number.
SUBMISSION = timedelta(seconds=120)
#: How long a run of another machine, whose locks may not be seen here, may be silent.
SILENCE = timedelta(minutes=15)


#: What is wrong with a run whose configuration was deleted: nothing can go on with it.
BROKEN = "broken: its config.yaml is gone; restore it, or delete the folder"
#: Why a run waits that is in nobody's list.
NOBODY = "prepared, and nobody starts it: quantexp resume does"


@dataclass(frozen=True)
class Standing:
    """What is true of a run now."""

    run: RunDir
    #: None where the folder does not say: no status, or a broken one.
    state: State | None
    #: Whether it waits, runs, or will be started again by the scheduler.
    alive: bool = False
    #: Why it ended, or was put back.
    reason: str = ""
    #: `here, process 123`, `job 123_4 running on n1`, `job 123_4 waiting (Resources)`; empty once it has ended.
    where: str = ""
    #: What could not be found out.
    note: str | None = None
    #: status.json as it is.
    status: Status = field(default_factory=Status)
    job: Job | None = None
    pace: Pace = field(default_factory=Pace)
    #: False for an end that may be a misunderstanding: a job that waits on another cluster is not known on this one.
    sure: bool = True

    @property
    def is_news(self) -> bool:
        """Whether it has surely ended, and status.json does not say so, or not why."""
        ended = self.state is not None and self.state not in (State.PENDING, State.RUNNING)
        told = (self.status.state, self.status.reason)
        return ended and self.sure and (self.state, self.reason) != told


def standing(run: RunDir) -> Standing:
    """What is true of one run."""
    return standings([run])[0]


def standings(runs: Sequence[RunDir]) -> list[Standing]:
    """What is true of each, in one question to the scheduler; where it does not answer, a note says so."""
    told = [_told(run) for run in runs]
    statuses = [s for s in told if isinstance(s, Status) and s.state is not State.COMPLETED]
    note = None
    try:
        jobs = dict(zip(map(id, statuses), jobs_of(statuses), strict=True))
    except ClientError as error:
        jobs, note = {}, f"its job was not looked at: {error}"
    found = [
        _standing(run, status, jobs.get(id(status)), note)
        if isinstance(status, Status)
        else Standing(run, None, reason=status)
        for run, status in zip(runs, told, strict=True)
    ]
    return _with_turns(found)


def _told(run: RunDir) -> Status | str:
    """What the folder says, or why it says nothing."""
    try:
        status = read_status(run.status)
    except RunError as error:
        return str(error).replace(f"{run.root}/", "")  # the run's name stands beside it
    return status or "it has no status.json: it was never started"


def _standing(run: RunDir, status: Status, job: Job | None, note: str | None) -> Standing:
    if status.submission is not None or status.job_id is not None:
        found = _of_submitted(run, status, job, note)
    else:
        found = _of_local(run, status)
    found = replace(found, job=job, pace=pace(run, found.status))
    if found.alive or run.config.is_file():
        return found
    return replace(found, state=None, reason=BROKEN, where="")


def _of_local(run: RunDir, status: Status) -> Standing:
    if status.state not in (State.PENDING, State.RUNNING):
        return Standing(run, status.state, False, status.reason, status=status)
    if is_locked(run) or _may_live(status):
        return Standing(run, status.state, True, status.reason, _process(status), status=status)
    status = _again(run, status)  # it may have ended while it was looked at
    if status.state is State.RUNNING and not is_locked(run):
        state, reason = of_lost_process(status)
        return Standing(run, state, False, reason, status=status)
    return Standing(run, status.state, False, status.reason, status=status)


def _with_turns(found: list[Standing]) -> list[Standing]:
    """The same, with what waits for its turn in a sweep, and what waits for nobody."""
    open_ = [each for each in found if each.state is State.PENDING and not each.alive]
    turns = {root: waiting_in(root) for root in {each.run.root.parent for each in open_}}

    def turned(each: Standing) -> Standing:
        if not (each.state is State.PENDING and not each.alive):
            return each
        sweep = turns[each.run.root.parent].get(each.run.root.name)
        if sweep is None:
            return replace(each, reason=each.reason or NOBODY)
        return replace(each, alive=True, where=f"waiting in sweep {sweep}")

    return [turned(each) for each in found]


def _may_live(status: Status) -> bool:
    """Whether a run without a lock may run all the same: locks are not seen everywhere."""
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
    if job is not None and job.alive and (not has_told(status) or _comes_back(job)):
        return _of_live_job(run, status, job)
    status = _again(run, status)  # it may have ended between the reading and the question
    if job is None and status.state in OPEN:
        return _of_lost(run, status)
    state, reason = status.state, status.reason
    if job is not None and not job.alive and not has_told(status):
        state, reason = _end(run, status, job)
    return Standing(run, state, False, reason, status=status)


def _of_lost(run: RunDir, status: Status) -> Standing:
    """A run without a job that anybody knows: it is being submitted, or its job is gone."""
    if is_locked(run) or _being_submitted(status):
        where = "being submitted" if status.started is None else _process(status)
        return Standing(run, status.state, True, status.reason, where, status=status)
    told = status.state is State.PREEMPTED
    state, reason = (status.state, status.reason) if told else of_lost_job(run, status)
    return Standing(run, state, False, reason, status=status, sure=began(run, status))


def _end(run: RunDir, status: Status, job: Job) -> Verdict:
    """A job's end, where the run knew no better: preempted is told, and a signal need not have been the scheduler's."""
    own = job.state in (JobState.COMPLETED, JobState.FAILED)
    if status.state is State.PREEMPTED and job.state is not JobState.CANCELLED:
        return status.state, status.reason
    if status.state is State.CANCELLED and own:
        return status.state, status.reason
    return of_job(run, status, job)


def _comes_back(job: Job) -> bool:
    return job.restarts > 0 and job.state in (JobState.PENDING, JobState.REQUEUED)


def _of_live_job(run: RunDir, status: Status, job: Job) -> Standing:
    """The run of a job that waits, runs or ends; one that is put back may have taken that for being cancelled."""
    where = f"job {job.id} {doing(job)}"
    if job.state not in (JobState.PENDING, JobState.REQUEUED):
        reason = status.reason if status.state is State.RUNNING else ""
        return Standing(run, State.RUNNING, True, reason, where, status=status)
    again = job.restarts or status.state is not State.PENDING
    reason = f"requeued ({_why_requeued(status)})" if again else status.reason
    return Standing(run, State.PENDING, True, reason, where, status=status)


def _why_requeued(status: Status) -> str:
    told = status.reason or (status.restarts[-1].get("reason") if status.restarts else None)
    return str(told or "put back by the scheduler")


def _being_submitted(status: Status) -> bool:
    return status.job_id is None and _age(status.updated) < SUBMISSION


def _age(time: str | None) -> timedelta:
    return timedelta.max if time is None else datetime.now(UTC) - datetime.fromisoformat(time)


def _again(run: RunDir, status: Status) -> Status:
    again = _told(run)
    return again if isinstance(again, Status) else status


def live_job(status: Status) -> str | None:
    """Words such as `job 123_4 is waiting (Resources)` if the run's job is alive; None otherwise.

    Raises:
        ClientError: as `live_jobs`.
    """
    return live_jobs([status])[0]


def live_jobs(statuses: Sequence[Status]) -> list[str | None]:
    """`live_job` of each, in one question to the scheduler; none where no run has a job.

    Raises:
        ClientError: SLURM is not here or does not answer, and a run that has not ended has a job.
    """
    try:
        found = jobs_of(statuses, past=False)
    except ClientError:
        if any(s.state in OPEN and (s.job_id or s.submission) for s in statuses):
            raise
        return [None] * len(statuses)
    return [f"job {job.id} is {doing(job)}" if job and job.alive else None for job in found]

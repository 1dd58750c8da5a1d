"""Finds the scheduler's job of a run from its status."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from quantexp.launch.ledger.job import Job
from quantexp.launch.ledger.scheduler import jobs, jobs_named
from quantexp.runs.status import INTERRUPTED, State, Status

#: States in which a run's job may be alive.
OPEN = (State.PENDING, State.RUNNING, State.PREEMPTED)


def jobs_of(statuses: Sequence[Status], *, past: bool = True) -> list[Job | None]:
    """The job of each status, with one query for all job ids; None if the run has no job or no one knows the job.

    A status without a job id, because its submission died before writing it, is searched by the submission's name. A
    job with the right id but another name is a different job: a reinstalled SLURM restarts its numbering. Jobs that
    ended more than a few minutes ago are queried only if `past`, and only for runs that have not recorded their end.

    Raises:
        ClientError: SLURM is not installed, or does not answer.
    """
    ids = {status.job_id for status in statuses if status.job_id is not None}
    unrecorded = {s.job_id for s in statuses if s.job_id is not None and not has_recorded_end(s)}
    by_id = jobs(ids, unrecorded if past else ()) if ids else {}
    names = {s.submission: s for s in statuses if s.submission and s.job_id is None}
    by_name = {name: jobs_named(name, _since(status), past=past) for name, status in names.items()}
    return [_job_of(status, by_id, by_name) for status in statuses]


def has_recorded_end(status: Status) -> bool:
    """Whether a submitted run has recorded its final end; only the scheduler knows the cause of a signal."""
    by_signal = status.state is State.CANCELLED and status.reason == INTERRUPTED
    return status.state not in OPEN and not by_signal


def _job_of(
    status: Status, by_id: dict[str, Job], by_name: dict[str, dict[int | None, Job]]
) -> Job | None:
    if status.job_id is None:
        tasks = by_name.get(status.submission or "", {})
        return tasks.get(status.task) or tasks.get(None)
    job = by_id.get(status.job_id)
    if job is None or (status.submission and job.name != status.submission):
        return None
    return job


def _since(status: Status) -> datetime | None:
    return datetime.fromisoformat(status.created) if status.created else None

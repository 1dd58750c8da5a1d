"""Which job of the scheduler belongs to a run, from what its status says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from quantexp.launch.ledger.job import Job
from quantexp.launch.ledger.scheduler import jobs, jobs_named
from quantexp.runs.status import INTERRUPTED, State, Status

#: States in which a run's job may well be alive.
OPEN = (State.PENDING, State.RUNNING, State.PREEMPTED)


def jobs_of(statuses: Sequence[Status], *, past: bool = True) -> list[Job | None]:
    """Each status's job, in one question for all whose job is known by number; None: nobody knows it, or it has none.

    A status without a number, because its submission did not live to write it, is looked for by the submission's
    name. A number whose job has another name is another job: SLURM begins anew when it is set up again. Jobs that ended
    more than some minutes ago are looked for only where a run has not told its end, and not without `past`.

    Raises:
        ClientError: SLURM is not here, or does not answer.
    """
    ids = {status.job_id for status in statuses if status.job_id is not None}
    untold = {s.job_id for s in statuses if s.job_id is not None and not has_told(s)}
    known = jobs(ids, untold if past else ()) if ids else {}
    names = {s.submission: s for s in statuses if s.submission and s.job_id is None}
    named = {name: jobs_named(name, _since(status), past=past) for name, status in names.items()}
    return [_job_of(status, known, named) for status in statuses]


def has_told(status: Status) -> bool:
    """Whether a submitted run has said for good how it ended; of a signal only the scheduler knows why it came."""
    by_signal = status.state is State.CANCELLED and status.reason == INTERRUPTED
    return status.state not in OPEN and not by_signal


def _job_of(
    status: Status, known: dict[str, Job], named: dict[str, dict[int | None, Job]]
) -> Job | None:
    if status.job_id is None:
        tasks = named.get(status.submission or "", {})
        return tasks.get(status.task) or tasks.get(None)
    job = known.get(status.job_id)
    if job is None or (status.submission and job.name != status.submission):
        return None
    return job


def _since(status: Status) -> datetime | None:
    return datetime.fromisoformat(status.created) if status.created else None

"""How a run ended that did not say so itself: from how its job ended, or from its process being gone.

`preempted` is an end from outside, after which a run may be started again as it is; `failed` is an end that would come
again; `cancelled` is what the user wanted.
"""

from __future__ import annotations

import signal
from pathlib import Path

from quantexp.launch.ledger.job import Job, JobState
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.ranks import log_end
from quantexp.runs.status import State, Status

#: A state, and why, in words.
Verdict = tuple[State, str]


def of_job(run: RunDir, status: Status, job: Job) -> Verdict:
    """The end of a run whose job has ended while its status said that it waits or runs."""
    match job.state:
        case JobState.CANCELLED:
            never = (job.reason or "").startswith("Dependency")
            return State.CANCELLED, "cancelled in the scheduler" + (
                f" ({job.reason})" if never else ""
            )
        case JobState.TIMEOUT:
            limit = f" of {job.time_limit_min} min" if job.time_limit_min else ""
            return State.PREEMPTED, (
                f"the time limit{limit} was reached at {progress(status)}; it will begin again at its first iteration, "
                "so give launcher.time_min more to quantexp resume"
            )
        case JobState.DEADLINE:
            return State.PREEMPTED, f"job {job.id} reached its deadline at {progress(status)}"
        case JobState.PREEMPTED:
            return State.PREEMPTED, f"job {job.id} was preempted and not put back into the queue"
        case JobState.NODE_FAIL | JobState.BOOT_FAIL:
            node = f"node {job.nodes}" if job.nodes else "a node"
            return State.PREEMPTED, f"{node} of job {job.id} failed, at {progress(status)}"
        case JobState.OUT_OF_MEMORY:
            return State.FAILED, (
                f"job {job.id} ran out of memory at {progress(status)}; give launcher.mem_gb more; "
                f"{last_words(run, status, job)}"
            )
        case JobState.COMPLETED:
            return State.FAILED, (
                f"job {job.id} has completed, and the run did not; {last_words(run, status, job)}"
            )
        case _:
            return State.FAILED, f"job {job.id} {_failed(job)}; {last_words(run, status, job)}"


def of_lost_job(run: RunDir, status: Status) -> Verdict:
    """The end of a run whose job nobody knows any more."""
    if status.job_id is None:
        return State.PREEMPTED, "its submission ended before SLURM had taken the job"
    if began(run, status):
        return State.PREEMPTED, (
            f"the scheduler no longer knows job {status.job_id}, and the run did not say how it ended, at "
            f"{progress(status)}"
        )
    return State.CANCELLED, (
        f"the scheduler no longer knows job {status.job_id}, which never started: cancelled there"
    )


def began(run: RunDir, status: Status) -> bool:
    """Whether a submitted run's job has ever started."""
    told = status.state is not State.PENDING or status.started is not None
    return told or any(file.exists() for file in job_logs(run, status))


def of_lost_process(status: Status) -> Verdict:
    """The end of a run that ran, on this or another machine, and whose lock nobody holds any more."""
    return State.PREEMPTED, (
        f"ended without a word: process {status.pid} on {status.host} is gone (killed, or the machine went down), at "
        f"{progress(status)}"
    )


def progress(status: Status) -> str:
    """`iteration 3 of 8`."""
    return f"iteration {status.iteration} of {status.iterations}"


def job_logs(run: RunDir, status: Status, job_id: str | None = None) -> list[Path]:
    """What the run's job prints before the run itself has a log, and after; none without a job."""
    number = job_id or status.job_id
    if status.submission is None or number is None:
        return []
    folder = RunsRoot(run.root.parent).submissions / status.submission
    return [folder / f"{number}_0_log.{end}" for end in ("out", "err")]


def last_words(run: RunDir, status: Status, job: Job) -> str:
    """The end of the run's log, or of what its job printed."""
    if run.rank_log(0).exists():
        return log_end(run.rank_log(0))
    logs = [log for log in job_logs(run, status, job.id) if log.exists() and log.stat().st_size]
    return log_end(logs[-1]) if logs else "it left no log"


def _failed(job: Job) -> str:
    if job.signal:
        return f"was ended by {signal_name(job.signal)}"
    if job.exit_code > 128:
        return f"failed with exit code {job.exit_code} ({signal_name(job.exit_code - 128)})"
    reason = f" ({job.reason})" if job.reason and job.reason != "NonZeroExitCode" else ""
    return f"failed with exit code {job.exit_code}{reason}"


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

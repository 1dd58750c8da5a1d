"""The outcome of a run that did not record its end, derived from the end of its job or process.

`preempted` is an end from outside, after which the run can be restarted unchanged; `failed` is an end that would
happen again; `cancelled` is the user's decision.
"""

from __future__ import annotations

import signal
from pathlib import Path

from quantexp.launch.ledger.job import Job, JobState
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.ranks import log_end
from quantexp.runs.status import State, Status

#: A state and its reason.
Verdict = tuple[State, str]


def of_job(run: RunDir, status: Status, job: Job) -> Verdict:
    """The outcome of a run whose job has ended while its status is still pending or running."""
    match job.state:
        case JobState.CANCELLED:
            by_dependency = (job.reason or "").startswith("Dependency")
            return State.CANCELLED, "cancelled in the scheduler" + (
                f" ({job.reason})" if by_dependency else ""
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
            return State.PREEMPTED, f"job {job.id} was preempted and not requeued"
        case JobState.NODE_FAIL | JobState.BOOT_FAIL:
            node = f"node {job.nodes}" if job.nodes else "a node"
            return State.PREEMPTED, f"{node} of job {job.id} failed, at {progress(status)}"
        case JobState.OUT_OF_MEMORY:
            return State.FAILED, (
                f"job {job.id} ran out of memory at {progress(status)}; give launcher.mem_gb more; "
                f"{end_of_log(run, status, job)}"
            )
        case JobState.COMPLETED:
            return State.FAILED, (
                f"job {job.id} has completed, and the run did not; {end_of_log(run, status, job)}"
            )
        case _:
            return State.FAILED, f"job {job.id} {_failed(job)}; {end_of_log(run, status, job)}"


def of_lost_job(run: RunDir, status: Status) -> Verdict:
    """The outcome of a run whose job the scheduler no longer knows."""
    if status.job_id is None:
        return State.PREEMPTED, "its submission ended before SLURM had taken the job"
    if began(run, status):
        return State.PREEMPTED, (
            f"the scheduler no longer knows job {status.job_id}, and the run did not record its end, at "
            f"{progress(status)}"
        )
    return State.CANCELLED, (
        f"the scheduler no longer knows job {status.job_id}, which never started: cancelled there"
    )


def began(run: RunDir, status: Status) -> bool:
    """Whether a submitted run's job has ever started."""
    has_started = status.state is not State.PENDING or status.started is not None
    return has_started or any(file.exists() for file in job_logs(run, status))


def of_lost_process(status: Status) -> Verdict:
    """The outcome of a running run, on this or another machine, whose lock no process holds."""
    return State.PREEMPTED, (
        f"died without recording why: process {status.pid} on {status.host} is gone (killed, or machine failure), at "
        f"{progress(status)}"
    )


def progress(status: Status) -> str:
    """`iteration 3 of 8`."""
    return f"iteration {status.iteration} of {status.iterations}"


def job_logs(run: RunDir, status: Status, job_id: str | None = None) -> list[Path]:
    """The files that hold the output of the run's job; empty without a job."""
    number = job_id or status.job_id
    if status.submission is None or number is None:
        return []
    folder = RunsRoot(run.root.parent).submissions / status.submission
    return [folder / f"{number}_0_log.{end}" for end in ("out", "err")]


def end_of_log(run: RunDir, status: Status, job: Job) -> str:
    """The end of the run's log, or of its job's output."""
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

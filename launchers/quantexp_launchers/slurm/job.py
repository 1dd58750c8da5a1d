"""The commands of a SLURM job on its nodes: `python -m quantexp_launchers.slurm.job begin|rank|end SUBMISSION [CODE]`.

`begin` checks that the folder still belongs to this submission. After a requeue it cuts the run back to its last whole
checkpoint, or moves the earlier start aside if there is none. `rank`, started by srun, runs the worker of one rank in a
child and watches it: srun cannot see that a worker is stopped or waits for ever. `end` records the end of a run that
could not record it. It knows the ranks' exit code, the record of each rank, and, from its standard input (`scontrol
show job`), what the scheduler is doing to the job. No verb calls SLURM's clients, which a container may not have: the
exit code requests a requeue.

A run is recorded as cancelled only if the scheduler reports that, because a cancelled run is never restarted.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantexp.capture.store.manifest import finish_capture
from quantexp.config.load import read
from quantexp.errors import QuantexpError, RunError, RunInUseError
from quantexp.model.checkpoints import next_iteration
from quantexp.runs.fencing import is_ours, take_over
from quantexp.runs.lock import locked
from quantexp.runs.outcome import (
    ENDED_FROM_OUTSIDE,
    SAVED_BEFORE_LIMIT,
    record_end,
    record_exit,
)
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.ranks import log_end, outcome_of_ranks
from quantexp.runs.snapshot import check_snapshot
from quantexp.runs.status import (
    State,
    Status,
    now,
    read_json,
    read_status,
    requeues,
    write_status,
)
from quantexp.runs.sweep_list import read_tasks
from quantexp.schema import Experiment, LauncherConfig
from quantexp.training.log import LOG, log_to_stderr
from quantexp_launchers.slurm.ends import (
    cause_printed,
    end_in_job,
    ending_job,
    is_requeued,
    read_within,
    reasons,
    record_of,
    restart_reason,
    too_many_requeues,
)
from quantexp_launchers.slurm.rank import run_rank
from quantexp_launchers.slurm.states import JobState, SlurmJob

#: `begin`'s exit code if the run has ended, or belongs to another submission.
NOTHING_TO_DO = 75
#: The exit code that makes the script requeue the job.
REQUEUE = 76
#: Seconds to wait for a submitter, or the last rank of an earlier start, to release the folder.
PATIENCE_S = 60.0
#: Seconds to wait for SLURM's answer while it ends the job: it kills remaining processes after KillWait (30 s).
JOB_RECORD_S = 10.0


@dataclass(frozen=True)
class Task:
    """The run of this job."""

    submission: Submission
    index: int
    run: RunDir
    #: The source snapshot.
    snapshot: Path
    #: The submitter's umask.
    umask: int
    #: 123, or 123_4 in an array.
    job_id: str
    #: SLURM's internal id of an array task.
    raw_job_id: str
    #: The number of earlier starts of the job.
    starts_before: int


def main(argv: list[str] | None = None) -> int:
    """Run `begin`, `rank` or `end` and return the exit code."""
    verb, folder, *rest = sys.argv[1:] if argv is None else argv
    if verb == "rank":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the worker can take the warning
    with log_to_stderr(f"job {verb}"):
        return _main(verb, Submission(Path(folder)), rest)


def _main(verb: str, submission: Submission, rest: list[str]) -> int:
    try:
        task = own_task(submission, os.environ)
        os.umask(task.umask)
        if verb == "begin":
            return begin(task)
        if verb == "rank":
            return run_rank(task.run, os.environ)
        record = read_within(sys.stdin.fileno(), JOB_RECORD_S)
        return end(task, int(rest[0]), record_of(record, task.raw_job_id))
    except QuantexpError as error:
        LOG.error(error)
        return 1


def own_task(submission: Submission, environment: Mapping[str, str]) -> Task:
    """The submission's run that is selected by SLURM_ARRAY_TASK_ID.

    Raises:
        RunError: the submission's folder is incomplete, or lists no such run.
    """
    index = int(environment.get("SLURM_ARRAY_TASK_ID", "0"))
    array, raw = environment.get("SLURM_ARRAY_JOB_ID"), environment["SLURM_JOB_ID"]
    content = read_tasks(submission)
    runs = content["runs"]
    if not 0 <= index < len(runs):
        raise RunError(f"{submission.tasks} lists {len(runs)} runs, and this is task {index}")
    return Task(
        submission,
        index,
        RunDir(Path(runs[index])),
        Path(content["snapshot"]),
        content["umask"],
        f"{array}_{index}" if array else raw,
        raw,
        int(environment.get("SLURM_RESTART_COUNT", "0")),
    )


def begin(task: Task) -> int:
    """Prepare the folder; returns 0, or NOTHING_TO_DO, or REQUEUE, or 1 if the run has failed.

    Raises:
        RunError, ConfigError: the folder is gone, cannot be read or is in use.
    """
    if not task.run.root.is_dir():
        raise RunError(f"the run folder {task.run.root} is gone; submit the run again")
    if _has_earlier_start(task, read_status(task.run.status)):
        take_over(task.run)  # ends the processes of an earlier start on a lost node
    try:
        with locked(task.run, PATIENCE_S):
            return _begin(task)
    except RunInUseError as error:
        launcher = read(task.run.config).launcher
        if launcher.chain or not 0 < task.starts_before < launcher.max_requeue:
            raise
        LOG.warning(f"{error}; the job is requeued")
        return REQUEUE


def _has_earlier_start(task: Task, status: Status | None) -> bool:
    """Whether this job, or the one before it in a chain, may still run on a lost node."""
    if status is None or not _is_task_s(status, task):
        return False
    return task.starts_before > 0 or status.job_id not in (None, task.job_id)


def _begin(task: Task) -> int:
    status = read_status(task.run.status)
    if status is None or not _is_task_s(status, task):
        LOG.info(f"{task.run.root} belongs to another submission by now")
        return NOTHING_TO_DO
    if status.state in (State.COMPLETED, State.CANCELLED):
        LOG.info(f"{task.run.root} is {status.state.value} already")
        return NOTHING_TO_DO
    if status.state is State.FAILED and not task.starts_before:  # in an earlier job of a chain
        LOG.info(f"{task.run.root} has failed: {status.reason}")
        return 1
    try:
        check_snapshot(task.snapshot)
        experiment = read(task.run.config)
    except QuantexpError as error:
        record_end(task.run, State.FAILED, str(error))
        return 1
    if task.starts_before or status.started is not None:
        restarted = _restart(task, experiment, status)
        if restarted is None:
            return 1
        status = restarted
    take_over(task.run)
    status.job_id, status.host = task.job_id, platform.node()
    write_status(task.run.status, status)
    return 0


def _restart(task: Task, experiment: Experiment, before: Status) -> Status | None:
    """Prepare the folder for another start and return its status; None if `launcher.max_requeue` is exhausted."""
    from quantexp.launch.attempt import set_aside
    from quantexp.launch.going_on import RESERVE_BYTES, continuation, cut_back, status_of

    printed = cause_printed(task.submission.printed(task.job_id), before.started)
    reason, max_requeue = restart_reason(before, printed), experiment.launcher.most_restarts
    if len(requeues(before)) >= max_requeue:
        why = too_many_requeues([*reasons(before), reason], max_requeue)
        record_end(task.run, State.FAILED, why)
        return None
    run = task.run
    point, why_not = continuation(experiment, run)
    if point is not None:
        LOG.info(f"restarted by the scheduler ({reason}); {point.notice or 'goes on'}")
        cut_back(run, experiment.capture.dir, point.iteration)
        status = status_of(point, experiment, requeued=True, reason=reason)
        status.submission, status.task = before.submission, before.task
        status.folder = before.folder
        return status
    why = why_not or "it begins again at its first iteration"
    LOG.info(f"restarted by the scheduler ({reason}); {why}")
    if before.started is not None:
        set_aside(run, experiment.capture.dir, keep=(run.config, run.provenance, run.status))
        run.logs.mkdir(exist_ok=True, mode=0o700)
        run.reserve.write_bytes(bytes(RESERVE_BYTES))
    return Status(
        launcher=before.launcher,
        created=before.created,
        iterations=before.iterations,
        submission=before.submission,
        task=before.task,
        folder=before.folder,
        restarts=[
            *before.restarts,
            {
                "time": now(),
                "reason": reason,
                "iteration": before.iteration,
                "goes_on_from": None,
                "lost": before.iteration,
                "requeued": True,
                "changed": [],
            },
        ],
    )


def end(task: Task, code: int, job: Mapping[str, str]) -> int:
    """Record the end of the run and return the exit code of the script: 0, 1, or REQUEUE.

    Args:
        task: the job's task.
        code: srun's exit code; also 0 if srun itself was ended, for instance together with its node.
        job: the scheduler's record of the job; empty if it did not answer.
    """
    with locked(task.run, PATIENCE_S):
        status = read_status(task.run.status)
        if status is None or not _is_task_s(status, task) or not is_ours(task.run):
            LOG.info(f"another start of the job has taken over {task.run.root}")
            return 1
        experiment = read(task.run.config)
        launcher = experiment.launcher
        finish_capture(task.run.captured(experiment.capture.dir))
        printed = cause_printed(task.submission.printed(task.job_id), status.started)
        ending = ending_job(job, task.starts_before) or _before_limit(task, status, launcher)
        if status.state is State.COMPLETED and (code == 0 or _all_completed(task.run, launcher)):
            return 0
        if ending is None:
            return _end_by_itself(task, launcher, code, has_record=bool(job))
        first = next_iteration(task.run)
        most = launcher.most_restarts
        record_end(task.run, *end_in_job(ending, status, most, printed, first=first))
        if launcher.chain:
            _pass_on(task)
            return 1
    # SLURM itself requeues in the other cases.
    needs_request = ending.state in (JobState.PREEMPTED, JobState.TIMEOUT)
    may_requeue = len(requeues(status)) < launcher.max_requeue and is_requeued(ending, first)
    return REQUEUE if needs_request and may_requeue else 1


def _before_limit(task: Task, status: Status, launcher: LauncherConfig) -> SlurmJob | None:
    """The end of a job whose run saved a checkpoint and ended just before the time limit."""
    if (status.state, status.reason) != (State.PREEMPTED, SAVED_BEFORE_LIMIT):
        return None
    return SlurmJob(task.job_id, "", JobState.TIMEOUT, time_limit_min=launcher.time_min)


def _pass_on(task: Task) -> None:
    """Let the ledger look at the next job of a chain, which waits and goes on with the run."""
    status, file = read_status(task.run.status), task.submission.chain
    if status is None or status.state is not State.PREEMPTED or not file.exists():
        return
    own, _, index = task.job_id.partition("_")
    chain = [str(each) for each in read_json(file)]
    if own in chain[:-1]:
        following = chain[chain.index(own) + 1]
        status.job_id = f"{following}_{index}" if index else following
        write_status(task.run.status, status)


def _end_by_itself(task: Task, launcher: LauncherConfig, code: int, *, has_record: bool) -> int:
    """Record the end of a run that the scheduler did not end, or whose job it did not report on."""
    run, alone = task.run, launcher.num_processes == 1
    code = 128 - code if code > 128 else code  # srun's code for a signal
    record_exit(run, launcher.num_processes, code if alone else 1)
    status = read_status(run.status)
    assert status is not None
    if status.state is State.COMPLETED:
        return 0
    if status.state in (State.PREEMPTED, State.CANCELLED):
        if has_record:
            record_end(run, State.CANCELLED, "ended by a signal that the scheduler did not send")
        else:
            why = f"{ENDED_FROM_OUTSIDE}, and the scheduler did not say why"
            record_end(run, State.PREEMPTED, why)
    elif not run.rank_log(0).exists():
        printed = log_end(task.submission.printed(task.job_id))
        record_end(run, State.FAILED, f"its ranks could not start (exit code {code}); {printed}")
    return 1


def _all_completed(run: RunDir, launcher: LauncherConfig) -> bool:
    """Whether every rank completed; a signal may have ended srun after that."""
    alone = launcher.num_processes == 1
    return alone or outcome_of_ranks(run, launcher.num_processes)[0] is State.COMPLETED


def _is_task_s(status: Status | None, task: Task) -> bool:
    own = (task.submission.root.name, task.index)
    return status is not None and (status.submission, status.task) == own


if __name__ == "__main__":
    sys.exit(main())

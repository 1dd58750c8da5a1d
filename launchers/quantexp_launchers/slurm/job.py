"""Begins and ends a SLURM job: `python -m quantexp_launchers.slurm.job begin|end SUBMISSION [CODE]`.

`begin` makes sure that this is still what was submitted, and, where the scheduler has started the run before, sets
aside what the earlier start left: a run begins again at its first iteration. `end` says how the
run ended where the run could not: it knows the ranks' exit code, what each rank left, and, from its standard input
(`scontrol show job`), what the scheduler is doing to the job. Neither calls SLURM's clients, which a container may not
have: that a job is to be put back into the queue is said by the exit code.

A run may only be given up as cancelled where the scheduler says so: a cancelled one does not come back.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantexp.capture.store.ending import finish_capture
from quantexp.config.load import read
from quantexp.errors import QuantexpError, RunError, RunInUseError
from quantexp.runs.fencing import is_ours, take_over
from quantexp.runs.lock import take_lock
from quantexp.runs.outcome import ENDED_FROM_OUTSIDE, record_end, record_exit
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.ranks import log_end, outcome_of_ranks
from quantexp.runs.snapshot import check_snapshot
from quantexp.runs.status import State, Status, now, read_json, read_status, write_status
from quantexp.schema import Experiment, LauncherConfig
from quantexp_launchers.slurm.termination import (
    PUT_BACK_WORDS,
    cause_printed,
    in_words,
    one_too_many,
    reasons,
    record_of,
    taken_away,
)

#: `begin`'s exit code where the run is over, or another submission's by now.
NOTHING_TO_DO = 75
#: The exit code with which the script is to put the job back into the queue.
PUT_BACK = 76
#: Seconds that a submitter, or an earlier start's last rank, may take to let go of the folder.
PATIENCE_S = 60.0
#: Beginnings of reasons that say less than what the node may have printed.
_VAGUE = (PUT_BACK_WORDS, ENDED_FROM_OUTSIDE)
#: Seconds for SLURM's answer while it is ending the job: it kills what is left after KillWait (30 s).
LAST_WORDS_S = 10.0


@dataclass(frozen=True)
class Task:
    """The run that this job is for."""

    submission: Submission
    index: int
    run: RunDir
    #: The source that it is to use.
    snapshot: Path
    #: The submitter's file mode mask.
    umask: int
    #: 123, or 123_4 in an array.
    job_id: str
    #: SLURM's own number of a task of an array.
    raw_job_id: str
    #: How often the scheduler had started the job before.
    starts_before: int


def main(argv: list[str] | None = None) -> int:
    """Run one end of the script."""
    verb, folder, *rest = sys.argv[1:] if argv is None else argv
    try:
        task = own_task(Submission(Path(folder)), os.environ)
        os.umask(task.umask)
        if verb == "begin":
            return begin(task)
        said = read_within(sys.stdin.fileno(), LAST_WORDS_S)
        return end(task, int(rest[0]), record_of(said, task.raw_job_id))
    except QuantexpError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def read_within(stream: int, within_s: float) -> str:
    """What a stream gives until it is closed or the time is up."""
    until, parts = time.monotonic() + within_s, []
    while (left := until - time.monotonic()) > 0 and select.select([stream], [], [], left)[0]:
        part = os.read(stream, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def own_task(submission: Submission, environment: Mapping[str, str]) -> Task:
    """Which of the submission's runs the job's environment speaks of.

    Raises:
        RunError: the submission's folder is not whole, or lists no such run.
    """
    index = int(environment.get("SLURM_ARRAY_TASK_ID", "0"))
    array, raw = environment.get("SLURM_ARRAY_JOB_ID"), environment["SLURM_JOB_ID"]
    content = read_json(submission.tasks)
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
    """Make the folder ready: 0, or NOTHING_TO_DO, or PUT_BACK, or 1 where the run has failed.

    Raises:
        RunError, ConfigError: the folder is gone, cannot be read or is in use.
    """
    if not task.run.root.is_dir():
        raise RunError(f"the run folder {task.run.root} is gone; submit the run again")
    if task.starts_before and _is_task_s(read_status(task.run.status), task):
        take_over(
            task.run
        )  # what an earlier start left on a node that was lost sees this, and ends
    try:
        with _locked(task.run):
            return _begin(task)
    except RunInUseError as error:
        if not 0 < task.starts_before < read(task.run.config).launcher.max_requeue:
            raise
        sys.stderr.write(f"{error}; the job is put back into the queue\n")
        return PUT_BACK


def _begin(task: Task) -> int:
    status = read_status(task.run.status)
    if status is None or not _is_task_s(status, task):
        sys.stderr.write(f"{task.run.root} belongs to another submission by now\n")
        return NOTHING_TO_DO
    if status.state in (State.COMPLETED, State.CANCELLED):
        sys.stderr.write(f"{task.run.root} is {status.state.value} already\n")
        return NOTHING_TO_DO
    try:
        check_snapshot(task.snapshot)
        experiment = read(task.run.config)
    except QuantexpError as error:
        record_end(task.run, State.FAILED, str(error))
        return 1
    if task.starts_before or status.started is not None:
        again = _again(task, experiment, status)
        if again is None:
            return 1
        status = again
    take_over(task.run)
    _write_pickle(task)
    status.job_id, status.host = task.job_id, platform.node()
    write_status(task.run.status, status)
    return 0


def _again(task: Task, experiment: Experiment, before: Status) -> Status | None:
    """The status of another start, or None after one too many; what the earlier start left is set aside."""
    from quantexp.launch.attempt import RESERVE_BYTES, set_aside

    why, most = _why_again(task, before), experiment.launcher.max_requeue
    if len(before.restarts) >= most:
        record_end(task.run, State.FAILED, one_too_many([*reasons(before), why], most))
        return None
    sys.stderr.write(
        f"started again by the scheduler ({why}); it begins again at its first iteration\n"
    )
    if before.started is not None:
        run = task.run
        set_aside(run, experiment.capture.dir, keep=(run.config, run.provenance, run.status))
        run.logs.mkdir(exist_ok=True)
        run.reserve.write_bytes(bytes(RESERVE_BYTES))
    return Status(
        created=before.created,
        iterations=before.iterations,
        submission=before.submission,
        task=before.task,
        restarts=[
            *before.restarts,
            {"time": now(), "reason": why, "iteration": before.iteration},
        ],
    )


def _why_again(task: Task, before: Status) -> str:
    """Why the scheduler starts a run again."""
    at = f"at iteration {before.iteration} of {before.iterations}"
    told = before.reason.partition("; ")[0]
    if before.state is State.FAILED:
        return f"put back after it had failed ({told})"
    if before.state is State.PREEMPTED and not told.startswith(_VAGUE):
        return told
    if printed := cause_printed(task.submission.printed(task.job_id), before.started):
        return f"{printed} {at}"
    if before.state is State.PREEMPTED:
        return told
    if before.started is None:
        return "put back before its first iteration"
    return f"died without recording why on {before.host} {at} (node lost?)"


def _write_pickle(task: Task) -> None:
    """What submitit gives to the ranks, where its submitter was killed before it could."""
    pickle = task.submission.pickle(task.job_id)
    if not pickle.exists():
        from submitit.core.utils import DelayedSubmission

        from quantexp_launchers.slurm.task import enter

        DelayedSubmission(enter, str(task.run.root), task.umask).dump(pickle)


def end(task: Task, code: int, job: Mapping[str, str]) -> int:
    """Say how the run ended, and return what the job is to exit with: 0, 1, or PUT_BACK.

    Args:
        task: this job's.
        code: srun's exit code; 0 also where srun itself was ended, with a node for instance.
        job: what the scheduler says of the job; empty where it did not answer.
    """
    with _locked(task.run):
        status = read_status(task.run.status)
        if status is None or not _is_task_s(status, task) or not is_ours(task.run):
            sys.stderr.write(f"{task.run.root} is another start's by now\n")
            return 1
        experiment = read(task.run.config)
        launcher = experiment.launcher
        finish_capture(task.run.captured(experiment.capture.dir))
        printed = cause_printed(task.submission.printed(task.job_id), status.started)
        taken = taken_away(job, task.starts_before, printed)
        if status.state is State.COMPLETED and (code == 0 or _all_completed(task.run, launcher)):
            return 0
        if taken is None:
            return _by_itself(task, launcher, code, asked=bool(job))
        state, reason = in_words(taken, status, launcher.max_requeue)
        record_end(task.run, state, reason)
    put_back = taken.has_to_ask and len(status.restarts) < launcher.max_requeue
    return PUT_BACK if put_back else 1


def _by_itself(task: Task, launcher: LauncherConfig, code: int, *, asked: bool) -> int:
    """The end of a run that the scheduler says it did nothing to, or of which it says nothing."""
    run, alone = task.run, launcher.num_processes == 1
    code = 128 - code if code > 128 else code  # srun's word for a signal
    record_exit(run, launcher.num_processes, code if alone else code or 1)
    status = read_status(run.status)
    assert status is not None
    if status.state is State.COMPLETED:
        return 0
    if status.state in (State.PREEMPTED, State.CANCELLED):
        if asked:
            record_end(run, State.CANCELLED, "ended by a signal that the scheduler did not send")
        else:
            why = f"{ENDED_FROM_OUTSIDE}, and the scheduler did not say why"
            record_end(run, State.PREEMPTED, why)
    elif not run.rank_log(0).exists():
        printed = log_end(task.submission.printed(task.job_id))
        record_end(run, State.FAILED, f"its ranks could not start (exit code {code}); {printed}")
    return 1


def _all_completed(run: RunDir, launcher: LauncherConfig) -> bool:
    """Whether every rank of a run whose first one completed has; the signal that ended one may have come later."""
    alone = launcher.num_processes == 1
    return alone or outcome_of_ranks(run, launcher.num_processes)[0] is State.COMPLETED


def _is_task_s(status: Status | None, task: Task) -> bool:
    own = (task.submission.root.name, task.index)
    return status is not None and (status.submission, status.task) == own


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    lock = take_lock(run, PATIENCE_S)
    try:
        yield
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())

"""Begin of a job's script: which runs begin, and which stay untouched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from quantexp_launchers.slurm import job
from quantexp_launchers.slurm.job import (
    NOTHING_TO_DO,
    REQUEUE,
    begin,
    main,
    own_task,
)

from quantexp.errors import RunError, RunInUseError
from quantexp.runs.fencing import is_ours, take_over
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status

from .job_world import BEGINS_AGAIN, World


def test_task_of_an_array_is_its_position_in_the_list(world: Callable[..., World]) -> None:
    task = world().task
    assert (task.index, task.job_id, task.raw_job_id, task.starts_before) == (1, "7_1", "12", 0)
    assert task.umask == 0o022


def test_job_alone_is_the_first_of_the_list(world: Callable[..., World]) -> None:
    submission = world().task.submission
    task = own_task(submission, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"})
    assert (task.run.root, task.job_id, task.starts_before) == (Path("/other"), "12", 2)


def test_position_beyond_the_list_is_refused(world: Callable[..., World]) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    with pytest.raises(RunError, match=r"tasks\.json lists 2 runs, and this is task 2"):
        own_task(world().task.submission, environment)


def test_error_is_one_line_and_exit_code_1(
    world: Callable[..., World], capsys: pytest.CaptureFixture[str]
) -> None:
    submission = world().task.submission
    submission.tasks.unlink()
    assert main(["begin", str(submission.root)]) == 1
    assert f" ERROR job begin: {submission.tasks} is missing" in capsys.readouterr().err


def test_pending_run_begins(world: Callable[..., World]) -> None:
    waits = world()
    assert begin(waits.task) == 0
    assert (waits.status.state, waits.status.job_id) == (State.PENDING, "7_1")
    assert is_ours(waits.run)
    assert not waits.run.attempts.exists()


def test_job_has_the_umask_of_the_submitter(world: Callable[..., World]) -> None:
    waits = world()
    before = os.umask(0o077)
    try:
        assert main(["begin", str(waits.task.submission.root)]) == 0
        assert os.umask(0o077) == 0o022
    finally:
        os.umask(before)


def test_vanished_folder_is_reported(world: Callable[..., World], tmp_path: Path) -> None:
    gone = world()
    gone.run.root.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"the run folder .* is gone; submit the run again"):
        begin(gone.task)


@pytest.mark.parametrize(("submission", "index"), [(None, None), ("q-2", 1), ("q-1", 0)])
def test_run_of_another_submission_is_left_alone(
    world: Callable[..., World],
    caplog: pytest.LogCaptureFixture,
    submission: str | None,
    index: int | None,
) -> None:
    caplog.set_level("INFO", "quantexp")
    other = world()
    other.record(State.PENDING, submission=submission, task=index)
    before, start = other.run.status.read_bytes(), other.run.start.read_text()
    for task in (other.task, other.started(1)):
        assert begin(task) == NOTHING_TO_DO
    assert "belongs to another submission by now" in caplog.text
    assert other.run.status.read_bytes() == before
    assert other.run.start.read_text() == start, "that of the claim under which it was prepared"


@pytest.mark.parametrize("state", [State.COMPLETED, State.CANCELLED])
def test_run_that_is_over_is_left_alone(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture, state: State
) -> None:
    caplog.set_level("INFO", "quantexp")
    over = world()
    over.record(state)
    assert begin(over.started(1)) == NOTHING_TO_DO
    assert f"is {state} already" in caplog.text


def test_changed_source_fails_the_run(world: Callable[..., World]) -> None:
    edited = world()
    file = edited.task.snapshot / "quantexp" / "training" / "worker.py"
    file.chmod(0o600)
    file.write_text("print('something else')\n")
    assert begin(edited.task) == 1
    assert edited.status.state is State.FAILED
    assert "the source this run was submitted with was changed in" in edited.status.reason


def test_changed_configuration_fails_the_run(world: Callable[..., World]) -> None:
    edited = world()
    edited.run.config.write_text("a: [")
    assert begin(edited.task) == 1
    assert edited.status.state is State.FAILED
    assert "config.yaml, line 2: did not find" in edited.status.reason


def test_folder_in_use_is_an_error_of_the_first_start(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = world()
    monkeypatch.setattr(job, "PATIENCE_S", 0.1)
    lock = take_lock(busy.run)
    with pytest.raises(RunInUseError, match=r"is in use by another process; wait for it, or stop"):
        begin(busy.task)
    os.close(lock)


def test_later_start_waits_in_the_queue_for_an_earlier_one_that_does_not_end(
    world: Callable[..., World],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a lost node the earlier start continues; it stops at its next write, unless it hangs."""
    caplog.set_level("INFO", "quantexp")
    busy = world()
    monkeypatch.setattr(job, "PATIENCE_S", 0.1)
    take_over(busy.run)
    lock = take_lock(busy.run)
    assert begin(busy.started(1)) == REQUEUE
    assert "; the job is requeued" in caplog.text
    monkeypatch.setenv("QUANTEXP_START", "12 0")
    assert not is_ours(busy.run), "the earlier start sees that it is over"
    with pytest.raises(RunInUseError):
        begin(busy.started(2))
    os.close(lock)


def test_next_start_sets_the_whole_earlier_one_aside(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quantexp")
    back = world()
    back.trains()
    back.record(State.PREEMPTED, f"preempted by another job at iteration 3 of 8; {BEGINS_AGAIN}")
    before, config = back.status, back.run.config.read_bytes()
    assert begin(back.started(1)) == 0
    status = back.status
    assert (status.state, status.started, status.iteration) == (State.PENDING, None, 0)
    assert (status.created, status.iterations) == (before.created, before.iterations)
    (restart,) = status.restarts
    assert restart["reason"] == "preempted by another job at iteration 3 of 8"
    assert restart["iteration"] == 3
    assert restart["time"] > before.created
    attempt = RunDir(back.run.attempts / "1")
    assert read_status(attempt.status) == before
    assert attempt.config.read_bytes() == back.run.config.read_bytes() == config
    assert attempt.provenance.read_bytes() == back.run.provenance.read_bytes()
    assert attempt.rank_log(0).read_text() == "words\n"
    assert not back.run.metrics.exists()
    assert back.run.reserve.stat().st_size == 1 << 16
    assert back.run.logs.is_dir()
    assert "restarted by the scheduler (preempted by" in caplog.text


@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        (State.RUNNING, "", "died without recording why on n1 at iteration 3 of 8 (node lost?)"),
        (State.FAILED, "loss nan; see x", "requeued after a failure (loss nan)"),
        (State.PREEMPTED, "requeued at iteration 3 of 8; it", None),
        (State.PREEMPTED, "ended from outside", "ended from outside"),
    ],
)
def test_restart_has_its_reason(
    world: Callable[..., World], state: State, reason: str, why: str | None
) -> None:
    back = world()
    back.trains()
    back.record(state, reason, host="n1")
    assert begin(back.started(1)) == 0
    assert back.status.restarts[0]["reason"] == (why or "requeued at iteration 3 of 8")


@pytest.mark.usefixtures("_utc")
@pytest.mark.parametrize("state", [State.RUNNING, State.PREEMPTED])
def test_node_s_own_log_gives_the_reason_that_the_run_could_not_give(
    world: Callable[..., World], state: State
) -> None:
    back = world()
    back.trains()
    back.record(state, "ended from outside")
    back.task.submission.printed("7_1").write_text(
        "slurmstepd-n2: error: *** JOB 12 ON n2 CANCELLED AT 2026-01-01T00:00:09 DUE TO PREEMPTION ***\n"
    )
    assert begin(back.started(1)) == 0
    assert back.status.restarts[0]["reason"] == "preempted by another job at iteration 3 of 8"


def test_start_that_never_reached_its_ranks_counts_too(world: Callable[..., World]) -> None:
    back = world()
    assert begin(back.task) == 0
    assert begin(back.started(1)) == 0
    assert back.status.restarts[0]["reason"] == "requeued before its first iteration"
    assert not back.run.attempts.exists(), "there is nothing to keep"


def test_one_start_too_many_fails_with_every_reason(world: Callable[..., World]) -> None:
    back = world()
    for times in (1, 2):
        back.trains()
        back.record(State.PREEMPTED, f"cause {times}; it will")
        assert begin(back.started(times)) == 0
    back.trains()
    back.record(State.PREEMPTED, "cause 3; it will")
    assert begin(back.started(3)) == 1
    assert back.status.state is State.FAILED
    assert back.status.reason == (
        "requeued 3 times, and launcher.max_requeue=2 allows no more: cause 1; cause 2; cause 3"
    )
    assert sorted(path.name for path in back.run.attempts.iterdir()) == ["1", "2"]

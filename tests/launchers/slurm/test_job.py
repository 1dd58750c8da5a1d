"""Begin and end of a job's script: which runs begin, which stay untouched, and how each end is recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from quantexp_launchers.slurm import job
from quantexp_launchers.slurm.job import (
    NOTHING_TO_DO,
    REQUEUE,
    begin,
    end,
    main,
    own_task,
)

from quantexp.config.compose import compose
from quantexp.config.load import read
from quantexp.config.load import save as write_config
from quantexp.errors import RunError, RunInUseError
from quantexp.launch.attempt import open_run
from quantexp.runs.fencing import is_ours, take_over
from quantexp.runs.lock import take_lock
from quantexp.runs.outcome import SAVED_BEFORE_LIMIT
from quantexp.runs.paths import RunDir, Submission
from quantexp.runs.ranks import RankRecord, write_record
from quantexp.runs.status import State, Status, read_status, write_json, write_status
from quantexp.schema import Experiment
from tests.launch.fake_checkpoint import save

#: The scheduler's record of a job that it leaves running.
RUNS = {"JobState": "RUNNING", "Reason": "None", "Restarts": "0", "PreemptTime": "None"}
CANCELLED = {**RUNS, "JobState": "COMPLETING"}
LIMIT = {**RUNS, "JobState": "COMPLETING", "Reason": "TimeLimit", "TimeLimit": "01:00:00"}
PREEMPTED = {**RUNS, "PreemptTime": "2026-11-21T05:45:54"}
BEGINS_AGAIN = "it will begin again at its first iteration"


@dataclass
class World:
    """A submitted run, as its job finds it."""

    task: job.Task
    experiment: Experiment
    monkeypatch: pytest.MonkeyPatch

    @property
    def run(self) -> RunDir:
        return self.task.run

    @property
    def status(self) -> Status:
        status = read_status(self.run.status)
        assert status is not None
        return status

    def record(self, state: State, reason: str = "", **values: object) -> None:
        """Write a status as the run does."""
        status = replace(self.status, state=state, reason=reason, **values)  # type: ignore[arg-type]
        write_status(self.run.status, status)

    def started(self, times: int) -> job.Task:
        """The job at its next start."""
        self.monkeypatch.setenv("QUANTEXP_START", f"12 {times}")
        return replace(self.task, starts_before=times)

    def trains(self, iteration: int = 3) -> None:
        """Leave the folder as a training run does."""
        self.record(State.RUNNING, iteration=iteration, started="2026-01-01T00:00:00.000+00:00")
        self.run.metrics.write_text('{"iteration": 1}\n')
        self.run.rank_log(0).write_text("words\n")


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    words = ["training=fast", "launcher=slurm", "launcher.max_requeue=2", "capture=tensors"]
    return compose(words, None, {})


@pytest.fixture
def world(
    composed: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., World]:
    def make(num_processes: int = 1) -> World:
        experiment = replace(composed, paths=replace(composed.paths, root=str(tmp_path / "runs")))
        experiment.launcher = replace(composed.launcher, num_processes=num_processes)
        experiment.training = replace(composed.training, micro_batch_size=1)
        with open_run(experiment, "cpu", ["test"]) as (folder, _):
            run = folder.run
        submission = Submission(tmp_path / "runs" / "submissions" / "q-1")
        submission.root.mkdir(parents=True)
        content = {"runs": ["/other", str(run.root)], "snapshot": str(folder.snapshot)}
        write_json(submission.tasks, {**content, "umask": 0o022})
        status = read_status(run.status)
        assert status is not None
        write_status(run.status, replace(status, submission="q-1", task=1))
        for name, value in {"JOB_ID": "12", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1"}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("QUANTEXP_START", "12 0")
        return World(own_task(submission, os.environ), experiment, monkeypatch)

    return make


# Which run a job is for.


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


# Beginning.


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


# Beginning again.


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


# The end.


@pytest.fixture
def ends(world: Callable[..., World]) -> Callable[..., World]:
    """A run whose job has begun."""

    def make(num_processes: int = 1) -> World:
        begun = world(num_processes)
        assert begin(begun.task) == 0
        begun.trains()
        return begun

    return make


def test_completed_run_exits_with_0(ends: Callable[..., World]) -> None:
    run = ends()
    run.record(State.COMPLETED)
    assert end(run.task, 0, RUNS) == 0
    assert run.status.state is State.COMPLETED


@pytest.mark.parametrize("job_record", [RUNS, CANCELLED, LIMIT, PREEMPTED, {}])
def test_completed_run_stays_completed_whatever_comes_after(
    ends: Callable[..., World], job_record: dict[str, str]
) -> None:
    run = ends()
    run.record(State.COMPLETED)
    assert end(run.task, 143, job_record) == 0
    assert run.status.state is State.COMPLETED


def test_failure_recorded_by_the_run_is_kept(ends: Callable[..., World]) -> None:
    run = ends()
    run.record(State.FAILED, "loss nan")
    assert end(run.task, 1, RUNS) == 1
    assert (run.status.state, run.status.reason) == (State.FAILED, "loss nan")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (137, "the worker was ended by SIGKILL (out of memory?); see "),
        (139, "the worker was ended by SIGSEGV; see "),
        (1, "the worker ended with exit code 1 and no reason; see "),
        (0, "the worker ended with exit code 0 and no reason; see "),
    ],
)
def test_death_without_a_record_is_a_failure(
    ends: Callable[..., World], code: int, words: str
) -> None:
    run = ends()
    assert end(run.task, code, RUNS) == 1
    assert run.status.state is State.FAILED
    assert run.status.reason.startswith(words)


def test_reason_of_ranks_that_could_not_start_is_their_output(ends: Callable[..., World]) -> None:
    run = ends()
    run.record(State.PENDING)
    run.run.rank_log(0).unlink()
    run.task.submission.printed("7_1").write_text("this run is for another number of processes\n")
    assert end(run.task, 1, RUNS) == 1
    assert run.status.state is State.FAILED
    assert run.status.reason.startswith("its ranks could not start (exit code 1); the end of ")
    assert run.status.reason.endswith("7_1_0_log.err:\nthis run is for another number of processes")


@pytest.mark.parametrize(
    ("job_record", "state", "words"),
    [
        (CANCELLED, State.CANCELLED, "cancelled in the scheduler at iteration 3 of 8"),
        (
            LIMIT,
            State.PREEMPTED,
            f"the time limit of 60 min was reached at iteration 3 of 8; {BEGINS_AGAIN}, so give "
            "launcher.time_min more to quantexp resume",
        ),
        (
            {**RUNS, "JobState": "NODE_FAIL", "NodeList": "n2"},
            State.PREEMPTED,
            f"node n2 was lost at iteration 3 of 8; {BEGINS_AGAIN}",
        ),
        (
            {**RUNS, "JobState": "PENDING", "Restarts": "1"},
            State.PREEMPTED,
            f"requeued at iteration 3 of 8; {BEGINS_AGAIN}",
        ),
    ],
)
def test_scheduler_s_cause_is_the_run_s_end(
    ends: Callable[..., World], job_record: dict[str, str], state: State, words: str
) -> None:
    run = ends()
    for code, before in ((130, State.PREEMPTED), (0, State.RUNNING), (137, State.RUNNING)):
        run.record(before, "ended from outside")
        assert end(run.task, code, job_record) == 1
        assert (run.status.state, run.status.reason) == (state, words)


def test_preempted_job_that_would_count_as_failed_is_requeued(ends: Callable[..., World]) -> None:
    run = ends()
    assert end(run.task, 130, PREEMPTED) == REQUEUE
    assert run.status.state is State.PREEMPTED
    run.record(State.RUNNING, restarts=[{"reason": "one"}, {"reason": "two"}])
    assert end(run.task, 130, PREEMPTED) == 1
    assert run.status.state is State.FAILED  # type: ignore[comparison-overlap]
    assert run.status.reason.startswith("requeued 3 times, and launcher.max_req")


def test_run_that_saved_before_its_time_limit_is_requeued_and_goes_on(
    ends: Callable[..., World],
) -> None:
    run = ends()
    save(run.run, 3)
    run.record(State.PREEMPTED, SAVED_BEFORE_LIMIT)
    assert end(run.task, 130, RUNS) == REQUEUE
    limit = (
        f"the time limit of {run.experiment.launcher.time_min} min was reached at iteration 3 of 8"
    )
    assert run.status.reason == f"{limit}; it will go on at iteration 4"
    run.run.metrics.write_text("".join(f'{{"iteration": {i}}}\n' for i in (1, 2, 3, 4)))
    assert begin(run.started(1)) == 0
    (restart,) = run.status.restarts
    assert (restart["reason"], restart["goes_on_from"], restart["requeued"]) == (
        limit,
        3,
        True,
    )
    assert (run.status.goes_on_from, run.status.submission, run.status.task) == (3, "q-1", 1)
    assert len(run.run.metrics.read_text().splitlines()) == 3
    assert not run.run.attempts.exists()


def test_time_limit_without_a_checkpoint_is_not_requeued(ends: Callable[..., World]) -> None:
    run = ends()
    assert end(run.task, 0, LIMIT) == 1
    save(run.run, 3)
    run.record(State.RUNNING)
    assert end(run.task, 0, LIMIT) == REQUEUE


def test_next_job_of_a_chain_goes_on(ends: Callable[..., World]) -> None:
    """Jobs 7, 8 and 9 are a chain of arrays; nothing is requeued."""
    run = ends()
    experiment = read(run.run.config)
    experiment.launcher.chain = 2
    write_config(experiment, run.run.config)
    write_json(run.task.submission.chain, ["7", "8", "9"])
    save(run.run, 3)
    assert end(run.task, 0, LIMIT) == 1
    assert (run.status.state, run.status.job_id) == (State.PREEMPTED, "8_1")
    run.monkeypatch.setenv("QUANTEXP_START", "13 0")
    following = replace(run.task, job_id="8_1")
    assert begin(following) == 0
    assert (run.status.goes_on_from, run.status.job_id) == (3, "8_1")
    run.record(State.FAILED, "loss nan", started="2026-01-01T00:00:00.000+00:00")
    run.monkeypatch.setenv("QUANTEXP_START", "14 0")
    assert begin(replace(run.task, job_id="9_1")) == 1, "a failure is not repeated"
    assert run.status.reason == "loss nan"


def test_signal_from_outside_the_scheduler_is_a_cancellation(
    ends: Callable[..., World],
) -> None:
    run = ends()
    run.record(State.PREEMPTED, "ended from outside")
    assert end(run.task, 130, RUNS) == 1
    assert run.status.state is State.CANCELLED
    assert run.status.reason == "ended by a signal that the scheduler did not send"


def test_run_may_begin_again_if_the_scheduler_gives_no_reason(
    ends: Callable[..., World],
) -> None:
    """Cancelled ones do not come back, and the scheduler may well have put it back."""
    run = ends()
    run.record(State.PREEMPTED, "ended from outside")
    assert end(run.task, 130, {}) == 1
    assert run.status.state is State.PREEMPTED
    assert run.status.reason == "ended from outside, and the scheduler did not say why"
    assert begin(run.started(1)) == 0


def test_end_of_an_older_start_changes_nothing(
    ends: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quantexp")
    run = ends()
    run.started(1)
    take_over(run.run)
    before = run.run.status.read_bytes()
    run.monkeypatch.setenv("QUANTEXP_START", "12 0")
    assert end(run.task, 130, CANCELLED) == 1
    assert run.run.status.read_bytes() == before
    assert "another start of the job has taken over" in caplog.text


def test_end_of_a_job_changes_nothing_once_its_run_is_submitted_again(
    ends: Callable[..., World],
) -> None:
    run = ends()
    run.record(State.PENDING, submission="q-2")
    before = run.run.status.read_bytes()
    assert end(run.task, 130, CANCELLED) == 1
    assert run.run.status.read_bytes() == before


# Several ranks.


def records(run: RunDir, *states: State, reason: str = "") -> None:
    """Leave each rank's record; the reason is the failed one's."""
    for rank, state in enumerate(states):
        why = reason if state is State.FAILED else ""
        write_record(run, rank, RankRecord(1, state, why, finished="2026-01-01"))
        run.rank_log(rank).write_text("words\n")


def test_rank_that_failed_first_is_the_reason(ends: Callable[..., World]) -> None:
    run = ends(2)
    records(run.run, State.RUNNING, State.FAILED, reason="out of space")
    assert end(run.task, 1, RUNS) == 1
    assert run.status.state is State.FAILED
    assert run.status.reason == f"rank 1: out of space; see {run.run.rank_log(1)}"


def test_rank_that_was_killed_is_named(ends: Callable[..., World]) -> None:
    run = ends(2)
    records(run.run, State.PREEMPTED, State.RUNNING)
    assert end(run.task, 137, RUNS) == 1
    assert run.status.reason.startswith("rank 1 did not end by itself (killed, out of memory, or")


def test_run_of_several_is_completed_only_if_every_rank_is(ends: Callable[..., World]) -> None:
    run = ends(2)
    run.record(State.COMPLETED)
    records(run.run, State.COMPLETED, State.FAILED, reason="no")
    assert end(run.task, 1, RUNS) == 1
    assert run.status.state is State.FAILED
    run.record(State.COMPLETED)
    records(run.run, State.COMPLETED, State.COMPLETED)
    assert end(run.task, 143, CANCELLED) == 0
    assert run.status.state is State.COMPLETED  # type: ignore[comparison-overlap]


def test_lists_of_captured_tensors_are_joined_whatever_the_end(ends: Callable[..., World]) -> None:
    run = ends(2)
    run.run.tensors.mkdir()
    for name in ("manifest.jsonl", "manifest.rank1.jsonl"):
        (run.run.tensors / name).write_text(f'{{"file": "{name}"}}\n')
    assert end(run.task, 130, CANCELLED) == 1
    names = sorted(path.name for path in run.run.tensors.iterdir())
    assert names == ["hashes.json", "manifest.jsonl"]
    assert len((run.run.tensors / "manifest.jsonl").read_text().splitlines()) == 2


def test_the_ends_of_a_job_import_no_torch() -> None:
    """SLURM kills what has not ended after KillWait, on a node that may be busy with other work."""
    script = "import sys, quantexp_launchers.slurm.job; sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0

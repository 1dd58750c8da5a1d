"""The end of a job's script: how each end of a run is recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from quantexp_launchers.slurm.job import (
    REQUEUE,
    begin,
    end,
)

from quantexp.config.load import read
from quantexp.config.load import save as write_config
from quantexp.runs.fencing import take_over
from quantexp.runs.outcome import SAVED_BEFORE_LIMIT
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import RankRecord, write_record
from quantexp.runs.status import State, write_json
from tests.launch.fake_checkpoint import save

from .job_world import BEGINS_AGAIN, World

#: The scheduler's record of a job that it leaves running.
RUNS = {"JobState": "RUNNING", "Reason": "None", "Restarts": "0", "PreemptTime": "None"}


CANCELLED = {**RUNS, "JobState": "COMPLETING"}


LIMIT = {**RUNS, "JobState": "COMPLETING", "Reason": "TimeLimit", "TimeLimit": "01:00:00"}


PREEMPTED = {**RUNS, "PreemptTime": "2026-11-21T05:45:54"}


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

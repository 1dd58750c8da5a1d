"""Runs pass through the slots: how many at once, in which order, shared with other processes, ended by a signal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
from quantexp_launchers.local import queue
from quantexp_launchers.local.display import Display
from quantexp_launchers.local.queue import Queue
from quantexp_launchers.local.slots import make_slots
from quantexp_launchers.local.stop import Stop
from quantexp_launchers.local.sweep import Sweep, prepare
from rich.console import Console

from quantexp.launch import attempt
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import INTERRUPTED, State, read_json, read_status
from quantexp.schema import Experiment

from .stand_in import Workers, output_of, put_status, until_interrupted

Work = Callable[..., Sweep]


@pytest.fixture
def work(workers: Workers, console: Console, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Prepares points, each an experiment and its stage, and works through them."""
    monkeypatch.setattr(queue, "LOOK_S", 0.05)
    monkeypatch.setattr(queue, "SIGNAL_S", 0.05)

    def through(
        points: list[tuple[Experiment, int]],
        num_slots: int = 1,
        stop: Stop | None = None,
        meanwhile: Callable[[Sweep], None] = lambda _: None,
    ) -> Sweep:
        sweep = prepare(points, console)
        meanwhile(sweep)
        with sweep.locked(), Display(sweep.items, console).shown() as display:
            Queue(sweep, make_slots(num_slots, 1), stop or Stop(), display).work()
        return sweep

    return through


def states(sweep: Sweep) -> list[str]:
    return [item.state.value for item in sweep.items]


def reason(sweep: Sweep, index: int) -> str:
    outcome = sweep.items[index].outcome
    assert outcome is not None
    return outcome.reason


def run_of(sweep: Sweep, index: int = 0) -> RunDir:
    run = sweep.items[index].run
    assert run is not None
    return run


def test_runs_of_one_slot_go_one_after_the_other_in_order(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    sweep = work([(make(seed), 0) for seed in (3, 1, 2)])
    assert states(sweep) == ["completed"] * 3
    assert workers.started == [3, 1, 2]
    assert workers.most == 1


def test_as_many_runs_go_on_at_once_as_there_are_slots(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    both = threading.Barrier(2)

    def meets(run: RunDir, _: object) -> None:
        both.wait(timeout=240)
        put_status(run, State.COMPLETED)

    workers.does = dict.fromkeys(range(6), meets)
    sweep = work([(make(seed), 0) for seed in range(6)], num_slots=2)
    assert states(sweep) == ["completed"] * 6
    assert workers.most == 2
    assert {v["OMP_NUM_THREADS"] for v in workers.variables} <= {"1", "2"}


def test_failed_run_does_not_stop_the_others_and_gives_its_slot_back(
    work: Work, workers: Workers, make: Callable[..., Experiment], console: Console
) -> None:
    workers.does[1] = lambda run, _: put_status(run, State.FAILED, "loss [nan]")
    sweep = work([(make(seed), 0) for seed in (1, 2)])
    assert states(sweep) == ["failed", "completed"]
    assert "failed     bf16 seed=1: loss [nan]\n" in output_of(console)


def test_bug_in_one_run_does_not_stop_the_others(
    work: Work,
    workers: Workers,
    make: Callable[..., Experiment],
    capfd: pytest.CaptureFixture[str],
) -> None:
    def stumbles(run: RunDir, _: object) -> None:
        raise ZeroDivisionError("by nought")

    workers.does[1] = stumbles
    sweep = work([(make(seed), 0) for seed in (1, 2)])
    assert states(sweep) == ["failed", "completed"]
    assert sweep.items[0].reason == "ZeroDivisionError: by nought"
    assert "Traceback" in capfd.readouterr().err


def test_completed_run_starts_nothing(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    work([(make(1), 0)])
    sweep = work([(make(1), 0), (make(2), 0)])
    assert workers.started == [1, 2]
    outcome = sweep.items[0].outcome
    assert outcome is not None
    assert outcome.skipped
    assert sweep.items[0].completed


def test_second_stage_waits_for_all_of_the_first(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    def last(run: RunDir, _: object) -> None:
        time.sleep(0.3)
        put_status(run, State.COMPLETED)

    workers.does[1] = last
    work([(make(9), 1), (make(1), 0), (make(2), 0)], num_slots=2)
    assert set(workers.started[:2]) == {1, 2}
    assert workers.started[2] == 9


def test_second_stage_does_not_start_where_the_first_did_not_complete(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    workers.does[1] = lambda run, _: put_status(run, State.FAILED, "loss nan")
    sweep = work([(make(1), 0), (make(2), 0), (make(9), 1)])
    assert states(sweep) == ["failed", "completed", "pending"]
    assert workers.started == [1, 2]
    why = "not started, because bf16 seed=1 has to complete first and is failed"
    assert reason(sweep, 2) == why
    status = read_status(run_of(sweep, 2).status)
    assert status is not None
    assert (status.state, status.reason) == (State.PENDING, why)


def test_run_locked_by_another_process_is_postponed_and_its_end_is_adopted(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    locked: list[tuple[RunDir, int]] = []

    def another(sweep: Sweep) -> None:
        locked.append((run_of(sweep), take_lock(run_of(sweep))))

    def ends_the_other_too(run: RunDir, _: object) -> None:
        other, lock = locked[0]
        put_status(other, State.COMPLETED)
        os.close(lock)
        put_status(run, State.COMPLETED)

    workers.does[2] = ends_the_other_too
    sweep = work([(make(1), 0), (make(2), 0)], meanwhile=another)
    assert states(sweep) == ["completed", "completed"]
    assert workers.started == [2]
    outcome = sweep.items[0].outcome
    assert outcome is not None
    assert outcome.skipped


def test_thread_that_exits_fails_its_run(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    def leaves(run: RunDir, _: object) -> None:
        raise SystemExit(3)

    workers.does[1] = leaves
    sweep = work([(make(1), 0)])
    assert states(sweep) == ["failed"]
    assert sweep.items[0].reason == "SystemExit: 3"


@pytest.mark.parametrize(
    ("state", "why", "runs_again"),
    [
        (State.FAILED, "loss nan", False),
        (State.CANCELLED, "cancelled while its sweep went on", False),
        (State.CANCELLED, INTERRUPTED, True),
        (State.RUNNING, "", True),  # it was killed and recorded nothing
    ],
)
def test_run_that_another_process_did_not_complete_runs_again_if_it_was_interrupted(
    work: Work,
    workers: Workers,
    make: Callable[..., Experiment],
    state: State,
    why: str,
    runs_again: bool,
) -> None:
    def another(sweep: Sweep) -> None:
        lock = take_lock(run_of(sweep))
        put_status(run_of(sweep), State.RUNNING)

        def end() -> None:
            put_status(run_of(sweep), state, why)
            os.close(lock)

        threading.Timer(0.5, end).start()

    sweep = work([(make(1), 0)], meanwhile=another)
    assert workers.started == ([1] if runs_again else [])
    assert states(sweep) == (["completed"] if runs_again else [state.value])
    assert runs_again or reason(sweep, 0) == why


def test_run_that_failed_before_the_sweep_runs_again(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    workers.does[1] = lambda run, _: put_status(run, State.FAILED, "loss nan")
    work([(make(1), 0)])
    workers.does.clear()
    assert states(work([(make(1), 0)])) == ["completed"]
    assert workers.started == [1, 1]


def test_equal_points_run_once(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    sweep = work([(make(1), 0), (make(1), 0)], num_slots=2)
    assert states(sweep) == ["completed"] * 2
    assert workers.started == [1]


def test_run_forced_by_two_points_runs_once(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    work([(make(1), 0)])
    forced = make(1)
    forced.force = True
    sweep = work([(forced, 0), (forced, 0)])
    assert states(sweep) == ["completed"] * 2
    assert workers.started == [1, 1]
    assert (run_of(sweep).attempts / "1").is_dir()


def test_run_cancelled_before_it_started_is_not_started(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    def cancel(sweep: Sweep) -> None:
        put_status(run_of(sweep, 1), State.CANCELLED, "cancelled by its user")

    sweep = work([(make(seed), 0) for seed in (1, 2, 3)], meanwhile=cancel)
    assert states(sweep) == ["completed", "cancelled", "completed"]
    assert workers.started == [1, 3]


def test_run_cancelled_alone_is_not_taken_over_by_others(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    workers.does[1] = lambda run, _: put_status(run, State.CANCELLED, INTERRUPTED)
    sweep = work([(make(seed), 0) for seed in (1, 2)])
    assert states(sweep) == ["cancelled", "completed"]
    assert reason(sweep, 0) == "cancelled while its sweep went on"


def test_run_in_a_scheduler_is_reported_and_the_queue_does_not_wait_for_it(
    work: Work,
    workers: Workers,
    make: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit(_: Sweep) -> None:
        monkeypatch.setattr(attempt, "_elsewhere", lambda *_: "job 12 is waiting")

    sweep = work([(make(1), 0)], meanwhile=submit)
    assert workers.started == []
    assert states(sweep) == ["pending"]
    assert reason(sweep, 0) == "job 12 is waiting"


def test_stop_ends_the_running_runs_and_leaves_the_rest_pending_with_a_reason(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    stop = Stop()

    def runs_until_ended(run: RunDir, on_poll: Callable[[], None]) -> None:
        if len(workers.started) == 2:
            stop.request()
        until_interrupted(run, on_poll)

    workers.does = dict.fromkeys((1, 2), runs_until_ended)
    sweep = work([(make(seed), 0) for seed in (1, 2, 3)], num_slots=2, stop=stop)
    assert states(sweep) == ["cancelled", "cancelled", "pending"]
    assert reason(sweep, 0) == INTERRUPTED
    status = read_status(run_of(sweep, 2).status)
    assert status is not None
    assert status.state is State.PENDING
    assert status.reason == "its sweep was interrupted before it started"


def test_run_locked_by_another_process_does_not_delay_a_stopped_sweep(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    stop = Stop()
    locks: list[int] = []

    def another(sweep: Sweep) -> None:
        locks.append(take_lock(run_of(sweep)))
        put_status(run_of(sweep), State.RUNNING)
        threading.Timer(0.2, stop.request).start()

    sweep = work([(make(1), 0)], stop=stop, meanwhile=another)
    os.close(locks[0])
    assert states(sweep) == ["running"]
    assert workers.started == []


def test_bug_of_the_queue_itself_leaves_no_run_behind(
    work: Work,
    workers: Workers,
    make: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    def runs_until_ended(run: RunDir, on_poll: Callable[[], None]) -> None:
        until_interrupted(run, on_poll)
        ended.append(1)

    def stumbles(*_: object) -> None:
        raise ZeroDivisionError

    workers.does[1] = runs_until_ended
    monkeypatch.setattr(Display, "update", lambda *_: stumbles() if workers.started else None)
    with pytest.raises(ZeroDivisionError):
        work([(make(1), 0)])
    assert ended == [1]


def test_sheet_that_cannot_be_written_for_a_while_ends_no_run(
    work: Work,
    workers: Workers,
    make: Callable[..., Experiment],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fills_the_disk(run: RunDir, _: object) -> None:
        put_status(run, State.COMPLETED)
        patch = pytest.MonkeyPatch()
        patch.setattr("quantexp.runs.sweep_list.write_json", full)
        undo.append(patch)

    def full(*_: object) -> None:
        undo.pop().undo()
        raise OSError(28, "No space left on device")

    undo: list[pytest.MonkeyPatch] = []
    workers.does[1] = fills_the_disk
    sweep = work([(make(seed), 0) for seed in (1, 2)])
    assert states(sweep) == ["completed"] * 2
    assert "list of runs cannot be written to " in output_of(console)
    assert [row["state"] for row in read_json(sweep.files.listing)["runs"]] == ["completed"] * 2


def test_run_whose_folder_vanished_is_created_again(
    work: Work, workers: Workers, make: Callable[..., Experiment]
) -> None:
    def vanish(sweep: Sweep) -> None:
        run_of(sweep).root.rename(sweep.root / "gone")

    sweep = work([(make(1), 0)], meanwhile=vanish)
    assert states(sweep) == ["completed"]
    assert run_of(sweep).config.is_file()

"""The trackers in rank 0: whatever they do, the rank continues, neither delayed nor ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quantexp.runs.status import State
from quantexp.training.tracking import clients, upload
from quantexp.training.tracking.clients import Tracking
from quantexp.training.tracking.events import TrackedRun
from quantexp.training.tracking.trackers import BACKENDS

from .conftest import line
from .memory import Memory

Make = Callable[..., TrackedRun]
REMOTE = ("tracking.tensorboard=false", "tracking.wandb.enabled=true")
#: Far longer than a step that waits for nothing, on a busy machine too; far shorter than the trackers below wait.
AT_ONCE_S = 20.0


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A tracker in the place of W&B."""
    monkeypatch.setattr(upload, "LOOK_S", 0.01)
    memory = Memory()
    monkeypatch.setitem(BACKENDS, "wandb", memory)
    return memory


@pytest.fixture
def never() -> Iterator[Callable[[], None]]:
    """A wait that ends with the test."""
    over = threading.Event()
    yield lambda: (over.wait(), None)[1]
    over.set()


def start_tracking(run: TrackedRun, earlier: dict[str, Any] | None = None) -> Tracking:
    tracking = Tracking(run.folder, run.experiment, earlier)
    tracking.start(run.created)
    return tracking


def log(tracking: Tracking, run: TrackedRun, *iterations: int) -> None:
    """Log iterations as the observer does."""
    for iteration in iterations:
        with run.folder.metrics.open("a") as stream:
            stream.write(json.dumps(line(iteration)) + "\n")
        tracking.log(line(iteration))


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_run_without_trackers_reports_nothing(tracked: Make) -> None:
    tracking = start_tracking(tracked("tracking.tensorboard=false"))
    tracking.log(line(1))
    tracking.end(State.COMPLETED, "")
    assert tracking.report() == {}


# Files that the rank writes itself.


def test_report_has_the_destination_and_the_iteration(tracked: Make) -> None:
    tracking = start_tracking(tracked())
    tracking.log(line(1))
    tracking.log(line(2))
    tracking.end(State.COMPLETED, "")
    assert tracking.report() == {
        "tensorboard": {
            "where": "tensorboard",
            "id": "tiny_data_bf16-0a1b2c3d.1",
            "iteration": 2,
            "ended": True,
            "trouble": "",
        }
    }


def test_tracker_that_cannot_start_is_reported_once_and_left_out(
    tracked: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = tracked()
    run.folder.tensorboard.write_text("in the way")
    tracking = start_tracking(run)
    tracking.log(line(1))
    tracking.end(State.COMPLETED, "")
    report = tracking.report()["tensorboard"]
    assert report["trouble"].startswith("FileExistsError: ")
    assert (report["where"], report["iteration"], report["ended"]) == ("", 0, False)
    (message,) = caplog.messages
    assert message.startswith("tracking.tensorboard: FileExistsError: ")
    assert message.endswith("; the run continues")


def test_reported_trouble_contains_no_secret(
    tracked: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    run = tracked()

    def fails(*_: object) -> None:
        raise OSError("https://me:password@there refuses hf_aSecretOfTheHub")

    monkeypatch.setattr("quantexp.training.tracking.tensorboard.start", fails)
    trouble = start_tracking(run).report()["tensorboard"]["trouble"]
    assert trouble == "OSError: https://there refuses <HF_TOKEN>"
    assert trouble in caplog.text


def test_interrupt_is_not_a_trackers_failure(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = start_tracking(tracked())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantexp.training.tracking.event_file.EventFile.scalars", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tracking.log(line(1))
    monkeypatch.undo()
    tracking.end(State.CANCELLED, "interrupted")
    assert tracking.report()["tensorboard"]["ended"]


# A tracker that may wait for a network.


def test_every_iteration_and_the_end_arrive_in_order(tracked: Make, remote: Memory) -> None:
    run = tracked(*REMOTE)
    tracking = start_tracking(run)
    log(tracking, run, 1)
    wait_for(lambda: tracking.report()["wandb"]["iteration"] == 1)
    log(tracking, run, 2, 3)
    tracking.end(State.FAILED, "loss nan")
    assert (remote.starts, remote.iterations) == ([None], [1, 2, 3])
    assert remote.ends == [(State.FAILED, "loss nan")]
    assert tracking.report() == {
        "wandb": {
            "where": "https://there/theirs",
            "id": "theirs",
            "iteration": 3,
            "ended": True,
            "trouble": "",
        }
    }


def test_tracker_is_called_after_the_first_iteration_and_by_its_thread_alone(
    tracked: Make, remote: Memory
) -> None:
    run = tracked(*REMOTE)
    tracking = start_tracking(run)
    time.sleep(0.2)
    assert remote.threads == set()
    log(tracking, run, 1)
    tracking.end(State.COMPLETED, "")
    assert remote.threads == {"wandb"}


def test_run_that_ends_before_its_first_iteration_is_reported(
    tracked: Make, remote: Memory
) -> None:
    start_tracking(tracked(*REMOTE)).end(State.FAILED, "no data")
    assert (remote.iterations, remote.ends) == ([], [(State.FAILED, "no data")])


@pytest.mark.parametrize("state", [State.COMPLETED, State.CANCELLED])
def test_tracker_that_never_answers_delays_neither_a_step_nor_the_end(
    tracked: Make,
    remote: Memory,
    never: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    state: State,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 1.0 if state is State.COMPLETED else 600.0)
    monkeypatch.setattr(clients, "SHORT_PATIENCE_S", 1.0)
    remote.before = never
    run = tracked(*REMOTE)
    started = time.monotonic()
    tracking = start_tracking(run)
    log(tracking, run, *range(1, 101))
    tracking.end(state, "")
    assert time.monotonic() - started < AT_ONCE_S
    report = tracking.report()["wandb"]
    assert report["trouble"] == "not everything sent within 1 s"
    assert (report["iteration"], report["ended"]) == (0, False)
    assert caplog.messages == ["tracking.wandb: not everything sent within 1 s; the run continues"]


def test_tracker_that_never_answers_does_not_hold_another(
    tracked: Make, never: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 1.0)
    hangs, answers = Memory(before=never), Memory()
    answers.NAME = "mlflow"
    monkeypatch.setitem(BACKENDS, "wandb", hangs)
    monkeypatch.setitem(BACKENDS, "mlflow", answers)
    run = tracked("tracking.wandb.enabled=true", "tracking.mlflow.enabled=true")
    tracking = start_tracking(run)
    log(tracking, run, 1)
    wait_for(lambda: answers.iterations)
    tracking.end(State.COMPLETED, "")
    assert [(name, each["ended"]) for name, each in tracking.report().items()] == [
        ("tensorboard", True),
        ("wandb", False),
        ("mlflow", True),
    ]


def test_tracker_that_fails_is_reported_once_and_gets_everything_later(
    tracked: Make,
    remote: Memory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(upload, "PAUSE_S", 0.01)
    failures: list[str] = []

    def fail() -> None:
        failures.append("")
        raise ConnectionError("network away\nat https://me:password@there")

    run = tracked(*REMOTE)
    tracking = start_tracking(run)
    log(tracking, run, 1)
    wait_for(lambda: remote.iterations == [1])
    remote.before = fail
    log(tracking, run, 2)
    wait_for(lambda: len(failures) > 2)
    assert tracking.report()["wandb"]["trouble"] == "ConnectionError: network away"
    assert tracking.report()["wandb"]["iteration"] == 1
    remote.before = lambda: None
    log(tracking, run, 3)
    wait_for(lambda: remote.iterations == [1, 2, 3])
    tracking.end(State.COMPLETED, "")
    report = tracking.report()["wandb"]
    assert (report["iteration"], report["ended"], report["trouble"]) == (3, True, "")
    assert caplog.messages == ["tracking.wandb: ConnectionError: network away; the run continues"]


def test_tracker_in_trouble_is_retried_less_and_less_often_and_at_the_end(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionError

    run = tracked(*REMOTE)
    sender = upload.Upload(Memory(before=fail), run, upload.record_of({}))
    pauses: list[float] = []

    def wait(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 8:
            sender.end(State.COMPLETED, "")

    monkeypatch.setattr(sender._has_ended, "wait", wait)
    errors: list[str] = []
    sender.follow(lambda: errors.append(sender.delivery["trouble"]))
    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600]
    assert errors == ["ConnectionError: "] * 9


def test_rank_waits_only_briefly_for_a_tracker_in_trouble(
    tracked: Make, remote: Memory, never: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PAUSE_S", 0.01)
    monkeypatch.setattr(clients, "PATIENCE_S", 600.0)
    monkeypatch.setattr(clients, "TROUBLED_PATIENCE_S", 0.5)
    tries: list[str] = []

    def fail_and_hang() -> None:
        tries.append("")
        if len(tries) > 1:
            never()
        raise ConnectionError("network away")

    remote.before = fail_and_hang
    run = tracked(*REMOTE)
    tracking = start_tracking(run)
    log(tracking, run, 1)
    wait_for(lambda: len(tries) > 1)
    started = time.monotonic()
    tracking.end(State.COMPLETED, "")
    assert time.monotonic() - started < AT_ONCE_S
    assert tracking.report()["wandb"]["trouble"] == "ConnectionError: network away"


def test_run_that_goes_on_continues_with_its_id_and_repeats_no_iteration(
    tracked: Make, remote: Memory
) -> None:
    run = tracked(*REMOTE)
    first = start_tracking(run)
    log(first, run, 1, 2, 3)
    first.end(State.PREEMPTED, "node taken")
    run.folder.metrics.unlink()
    run.folder.metrics.write_text(json.dumps(line(1)) + "\n")  # cut back to its checkpoint
    second = start_tracking(run, first.report())
    report = second.report()["wandb"]
    assert (report["id"], report["iteration"], report["ended"]) == ("theirs", 3, False)
    log(second, run, 2, 3, 4)
    second.end(State.COMPLETED, "")
    assert (remote.starts, remote.iterations) == ([None, "theirs"], [1, 2, 3, 4])
    assert second.report()["wandb"]["ended"]


def test_reason_is_sent_without_secrets(
    tracked: Make, remote: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    start_tracking(tracked(*REMOTE)).end(State.FAILED, "cannot read hf_aSecretOfTheHub")
    assert remote.ends == [(State.FAILED, "cannot read <HF_TOKEN>")]

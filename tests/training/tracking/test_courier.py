"""A courier with a tracker that refuses, comes back, or was told before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from quantexp.errors import RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status
from quantexp.schema import TrackingConfig
from quantexp.training.tracking import courier
from quantexp.training.tracking.courier import Courier, tracked_run
from quantexp.training.tracking.delivery import Delivery, read_delivery, write_delivery
from quantexp.training.tracking.events import Point, TrackedRun

from .conftest import line

Make = Callable[..., TrackedRun]
CREATED = "2026-01-02T03:04:05+00:00"


@dataclass
class Server:
    """A tracker in memory, and the module in front of it."""

    NAME = "wandb"
    REMOTE = True
    refuses: Exception | None = None
    id: str = "theirs"
    where: str = "https://there/theirs"
    starts: list[str | None] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    ends: list[tuple[State, str]] = field(default_factory=list)

    def enabled(self, tracking: TrackingConfig) -> bool:
        return True

    def destination(self, tracking: TrackingConfig, run: RunDir) -> str:
        return "memory"

    def start(self, run: TrackedRun, earlier: str | None = None) -> Server:
        self.answer()
        self.starts.append(earlier)
        return self

    def log(self, points: Sequence[Point]) -> None:
        self.answer()
        self.iterations += [point.iteration for point in points]

    def end(self, state: State, reason: str) -> None:
        self.answer()
        self.ends.append((state, reason))

    def answer(self) -> None:
        if self.refuses is not None:
            raise self.refuses


def told(run: TrackedRun, *iterations: int) -> None:
    with run.folder.metrics.open("a") as stream:
        stream.writelines(json.dumps(line(i)) + "\n" for i in iterations)


def ended(run: TrackedRun, state: State = State.COMPLETED, reason: str = "") -> None:
    write_status(run.folder.status, Status(state, reason, created=run.created))


def record(run: TrackedRun) -> Delivery:
    return read_delivery(run.folder.delivery("wandb"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "POLL_S", 0.01)


def test_everything_is_told_in_order_and_put_on_record(tracked: Make) -> None:
    run, server = tracked(), Server()
    told(run, 1, 2)
    ended(run, State.FAILED, "loss nan")
    assert Courier(server, run).run(lambda: True) == 0
    assert (server.starts, server.iterations, server.ends) == (
        [None],
        [1, 2],
        [(State.FAILED, "loss nan")],
    )
    size = run.folder.metrics.stat().st_size
    assert record(run) == Delivery("https://there/theirs", "theirs", 2, size, True, "")


def test_run_is_followed_while_it_works(tracked: Make) -> None:
    run, server = tracked(), Server()
    courier_ = Courier(server, run)
    assert courier_.tell()
    for iteration in (1, 2):
        told(run, iteration)
        assert courier_.tell()
        assert record(run).iteration == iteration
    assert not record(run).ended
    courier_.metrics.close()


def test_what_was_refused_is_told_later_and_nothing_twice(
    tracked: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run, server = tracked(), Server()
    courier_ = Courier(server, run)
    told(run, 1)
    assert courier_.tell()
    server.refuses = ConnectionError("network away\nat https://me:password@there")
    told(run, 2)
    assert not courier_.tell()
    assert record(run).trouble == "ConnectionError: network away"
    assert record(run).iteration == 1
    said = "ConnectionError: network away\nat https://there\nasked again in 15 s\n"
    assert capsys.readouterr().err == said
    server.refuses = None
    told(run, 3)
    assert courier_.tell()
    assert server.iterations == [1, 2, 3]
    assert (record(run).trouble, record(run).iteration) == ("", 3)
    courier_.metrics.close()


def test_tracker_in_trouble_is_asked_less_and_less_often(
    tracked: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(courier, "LONGEST_PAUSE_S", 40.0)
    courier_ = Courier(Server(refuses=ConnectionError()), tracked())
    for _ in range(4):
        courier_.tell()
    said = capsys.readouterr().err.split()
    assert [int(word) for word in said if word.isdigit()] == [15, 30, 40, 40]


def test_pause_is_kept_but_the_end_is_told_at_once(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = tracked(), Server(refuses=ConnectionError("away"))
    told(run, 1)
    looks: list[bool] = []

    def worker_lives() -> bool:
        looks.append(True)
        if len(looks) == 5:
            server.refuses = None
            ended(run)
        return True

    courier_ = Courier(server, run)
    asked: list[tuple[tuple[State, str], ...]] = []
    tell = courier_.tell

    def counted(*end: tuple[State, str]) -> bool:
        asked.append(end)
        return tell(*end)

    monkeypatch.setattr(courier_, "tell", counted)
    assert courier_.run(worker_lives) == 0
    assert asked == [(), ((State.COMPLETED, ""),)], "once, then the pause, then the end"
    assert server.iterations == [1]


def test_trouble_at_the_end_is_on_record_and_the_exit_code(tracked: Make) -> None:
    run = tracked()
    ended(run)
    assert Courier(Server(refuses=ConnectionError("away")), run).run(lambda: True) == 1
    assert record(run).trouble == "ConnectionError: away"
    assert not record(run).ended


def test_second_courier_goes_on_where_the_first_was_stopped(tracked: Make) -> None:
    run, server = tracked(), Server()
    first = Courier(server, run)
    told(run, 1, 2)
    first.tell()
    first.metrics.close()
    told(run, 3)
    ended(run)
    assert Courier(server, run).run(lambda: True) == 0
    assert (server.starts, server.iterations) == ([None, "theirs"], [1, 2, 3])
    assert Courier(server, run).run(lambda: True) == 0, "nothing is left to tell"
    assert len(server.starts) == 2


def test_worker_that_starts_again_after_an_end_is_told_again(tracked: Make) -> None:
    run, server = tracked(), Server()
    told(run, 1)
    ended(run, State.PREEMPTED, "node taken")
    Courier(server, run).run(lambda: True)
    ended(run, State.RUNNING)
    courier_ = Courier(server, run)
    told(run, 2)
    courier_.tell()
    assert not record(run).ended
    courier_.metrics.close()
    assert server.iterations == [1, 2]


def test_worker_that_is_gone_without_a_word_is_a_failure(tracked: Make) -> None:
    run, server = tracked(), Server()
    assert Courier(server, run).run(lambda: False) == 0
    assert server.ends == [(State.FAILED, "the worker ended without a word")]


def test_folder_of_another_attempt_is_left_alone(tracked: Make) -> None:
    run, server = tracked(), Server()
    told(run, 1)
    courier_ = Courier(server, run)
    courier_.tell()
    other = Delivery("https://there/other", "other")
    write_delivery(run.folder.delivery("wandb"), other)
    write_status(run.folder.status, Status(State.RUNNING, created="2026-12-31T00:00:00+00:00"))
    assert courier_.run(lambda: True) == 0
    assert server.ends == [(State.FAILED, "the worker ended without a word")]
    assert record(run) == other


def test_reason_is_told_without_secrets(tracked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    run, server = tracked(), Server()
    ended(run, State.FAILED, "cannot read hf_aSecretOfTheHub")
    Courier(server, run).run(lambda: True)
    assert server.ends == [(State.FAILED, "cannot read <HF_TOKEN>")]


def test_record_that_cannot_be_written_stops_nothing(
    tracked: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run, server = tracked(), Server()
    ended(run)
    run.folder.delivery("wandb").mkdir()
    assert Courier(server, run).run(lambda: True) == 0
    assert server.ends
    assert "wandb.json cannot be written: " in capsys.readouterr().err


def test_status_that_cannot_be_read_is_not_the_end(
    tracked: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run, server = tracked(), Server()
    run.folder.status.write_text("{")
    told(run, 1)
    looks: list[bool] = []

    def worker_lives() -> bool:
        looks.append(True)
        if len(looks) == 3:
            ended(run)
        return True

    assert Courier(server, run).run(worker_lives) == 0
    assert server.ends == [(State.COMPLETED, "")]
    assert "status.json cannot be read" in capsys.readouterr().err


def test_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match=r"has no status\.json: it is no run folder, or was never"):
        tracked_run(RunDir(tmp_path))
    assert courier.main(["wandb", str(tmp_path)]) == 1
    assert "has no status.json" in capsys.readouterr().err


def test_run_of_a_folder_is_the_attempt_that_its_worker_tells_of(tracked: Make) -> None:
    run = tracked("training.seed=5")
    assert tracked_run(run.folder) == run


#: A worker: starts a courier whose tracker never answers, as `attached` does, says its process id, and waits.
WORKER = """\
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", sys.argv[1], "wandb", sys.argv[2], "--with-parent"])
print(process.pid, flush=True)
time.sleep(600)
"""
HANGING = """\
import sys, time
from quantexp.training.tracking import courier
courier.ORPHAN_S = 0.5
courier.BACKENDS["wandb"].start = lambda *_: time.sleep(600)
sys.exit(courier.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_courier_that_hangs_ends_soon_after_its_worker(tracked: Make) -> None:
    run = tracked()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, HANGING, str(run.folder.root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        time.sleep(2)  # for its handler of SIGTERM
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        assert psutil.pid_exists(pid), "a job's end is still to be told to the tracker"
        worker.kill()
    for _ in range(200):
        if not psutil.pid_exists(pid):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_record_of_no_use_is_no_reason_to_fail(tracked: Make) -> None:
    run, server = tracked(), Server()
    run.folder.delivery("wandb").write_text("{")
    told(run, 1)
    ended(run)
    assert Courier(server, run).run(lambda: True) == 0
    assert server.iterations == [1]

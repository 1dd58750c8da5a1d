"""An upload to a tracker that refuses, recovers, or has already received a part; and its record."""

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
from quantexp.training.tracking import events, upload
from quantexp.training.tracking.events import Point, TrackedRun
from quantexp.training.tracking.trackers import BACKENDS
from quantexp.training.tracking.upload import Delivery, Upload, error_line, tracked_run

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


def write_metrics(run: TrackedRun, *iterations: int) -> None:
    with run.folder.metrics.open("a") as stream:
        stream.writelines(json.dumps(line(i)) + "\n" for i in iterations)


def write_state(run: TrackedRun, state: State = State.COMPLETED, reason: str = "") -> None:
    write_status(run.folder.status, Status(state, reason, created=run.created))


def record(run: TrackedRun) -> Delivery:
    return Delivery.read(run.folder.delivery("wandb"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "POLL_S", 0.01)


def test_everything_is_sent_in_order_and_recorded(tracked: Make) -> None:
    run, server = tracked(), Server()
    write_metrics(run, 1, 2)
    write_state(run, State.FAILED, "loss nan")
    assert Upload(server, run).follow(lambda: True)
    assert (server.starts, server.iterations, server.ends) == (
        [None],
        [1, 2],
        [(State.FAILED, "loss nan")],
    )
    assert record(run) == Delivery("https://there/theirs", "theirs", 2, True, "")


def test_run_is_followed_while_it_trains(tracked: Make) -> None:
    run, server = tracked(), Server()
    upload_ = Upload(server, run)
    assert upload_.send()
    for iteration in (1, 2):
        write_metrics(run, iteration)
        assert upload_.send()
        assert record(run).iteration == iteration
    assert not record(run).ended
    upload_.close()


def test_refused_points_are_sent_later_and_none_twice(
    tracked: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run, server = tracked(), Server()
    upload_ = Upload(server, run)
    write_metrics(run, 1)
    assert upload_.send()
    server.refuses = ConnectionError("network away\nat https://me:password@there")
    write_metrics(run, 2)
    assert not upload_.send()
    assert record(run).trouble == "ConnectionError: network away"
    assert record(run).iteration == 1
    message = "ConnectionError: network away\nat https://there\nnext attempt in 15 s"
    assert caplog.messages == [message]
    server.refuses = None
    write_metrics(run, 3)
    assert upload_.send()
    assert server.iterations == [1, 2, 3]
    assert (record(run).trouble, record(run).iteration) == ("", 3)
    upload_.close()


def test_tracker_in_trouble_is_retried_less_and_less_often(
    tracked: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload, "LONGEST_PAUSE_S", 40.0)
    upload_ = Upload(Server(refuses=ConnectionError()), tracked())
    for _ in range(4):
        upload_.send()
    pauses = [message.rpartition(" in ")[2] for message in caplog.messages]
    assert pauses == ["15 s", "30 s", "40 s", "40 s"]


def test_pause_is_respected_but_the_end_is_sent_at_once(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = tracked(), Server(refuses=ConnectionError("away"))
    write_metrics(run, 1)
    looks: list[bool] = []

    def is_worker_alive() -> bool:
        looks.append(True)
        if len(looks) == 5:
            server.refuses = None
            write_state(run)
        return True

    upload_ = Upload(server, run)
    ends: list[tuple[tuple[State, str], ...]] = []
    send = upload_.send

    def counted_send(*end: tuple[State, str]) -> bool:
        ends.append(end)
        return send(*end)

    monkeypatch.setattr(upload_, "send", counted_send)
    assert upload_.follow(is_worker_alive)
    assert ends == [(), ((State.COMPLETED, ""),)], "once, then the pause, then the end"
    assert server.iterations == [1]


def test_trouble_at_the_end_is_recorded_and_sets_the_exit_code(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked()
    write_state(run)
    monkeypatch.setitem(BACKENDS, "wandb", Server(refuses=ConnectionError("away")))
    assert upload.main(["wandb", str(run.folder.root)]) == 1
    assert record(run).trouble == "ConnectionError: away"
    assert not record(run).ended


def test_second_upload_continues_where_the_first_was_stopped(tracked: Make) -> None:
    run, server = tracked(), Server()
    first = Upload(server, run)
    write_metrics(run, 1, 2)
    first.send()
    first.close()
    write_metrics(run, 3)
    write_state(run)
    assert Upload(server, run).follow(lambda: True)
    assert (server.starts, server.iterations) == ([None, "theirs"], [1, 2, 3])
    assert Upload(server, run).follow(lambda: True), "nothing is left to tell"
    assert len(server.starts) == 2


def test_worker_that_restarts_after_an_end_is_followed_again(tracked: Make) -> None:
    run, server = tracked(), Server()
    write_metrics(run, 1)
    write_state(run, State.PREEMPTED, "node taken")
    Upload(server, run).follow(lambda: True)
    write_state(run, State.RUNNING)
    upload_ = Upload(server, run)
    write_metrics(run, 2)
    upload_.send()
    assert not record(run).ended
    upload_.close()
    assert server.iterations == [1, 2]


def test_iterations_that_a_run_repeats_are_sent_once(tracked: Make) -> None:
    run, server = tracked(), Server()
    write_metrics(run, 1, 2, 3)
    write_state(run, State.PREEMPTED, "node taken")
    Upload(server, run).follow(lambda: True)
    run.folder.metrics.unlink()
    write_metrics(run, 1)  # cut back to its checkpoint
    write_state(run, State.RUNNING)
    upload_ = Upload(server, run)
    for iteration in (2, 3, 4):
        upload_.send()
        write_metrics(run, iteration)
    upload_.send()
    upload_.close()
    assert server.iterations == [1, 2, 3, 4]
    assert record(run).iteration == 4


def test_worker_that_ends_without_a_result_is_a_failure(tracked: Make) -> None:
    run, server = tracked(), Server()
    assert Upload(server, run).follow(lambda: False)
    assert server.ends == [(State.FAILED, "the worker ended without recording a result")]


def test_folder_of_another_attempt_is_left_alone(tracked: Make) -> None:
    run, server = tracked(), Server()
    write_metrics(run, 1)
    upload_ = Upload(server, run)
    upload_.send()
    other = Delivery("https://there/other", "other")
    other.write(run.folder.delivery("wandb"))
    write_status(run.folder.status, Status(State.RUNNING, created="2026-12-31T00:00:00+00:00"))
    assert upload_.follow(lambda: True)
    assert server.ends == [(State.FAILED, "the worker ended without recording a result")]
    assert record(run) == other


def test_reason_is_sent_without_secrets(tracked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    run, server = tracked(), Server()
    write_state(run, State.FAILED, "cannot read hf_aSecretOfTheHub")
    Upload(server, run).follow(lambda: True)
    assert server.ends == [(State.FAILED, "cannot read <HF_TOKEN>")]


def test_record_that_cannot_be_written_stops_nothing(
    tracked: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run, server = tracked(), Server()
    write_state(run)
    run.folder.delivery("wandb").mkdir()
    assert Upload(server, run).follow(lambda: True)
    assert server.ends
    assert "wandb.json cannot be written: " in caplog.text


def test_status_that_cannot_be_read_is_not_the_end(
    tracked: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run, server = tracked(), Server()
    run.folder.status.write_text("{")
    write_metrics(run, 1)
    looks: list[bool] = []

    def is_worker_alive() -> bool:
        looks.append(True)
        if len(looks) == 3:
            write_state(run)
        return True

    assert Upload(server, run).follow(is_worker_alive)
    assert server.ends == [(State.COMPLETED, "")]
    assert "status.json, line 1: " in caplog.text


def test_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match=r"has no status\.json: it is not a run folder, or its run"):
        tracked_run(RunDir(tmp_path))
    assert upload.main(["wandb", str(tmp_path)]) == 1
    assert "has no status.json" in capsys.readouterr().err


def test_run_of_a_folder_is_the_attempt_of_its_worker(tracked: Make) -> None:
    run = tracked("training.seed=5")
    assert tracked_run(run.folder) == run


#: A worker: starts an upload whose tracker never answers, prints its process id when that has asked, and waits.
WORKER = """\
import subprocess, sys, time
words = [sys.executable, "-c", sys.argv[1], "wandb", sys.argv[2], "--with-parent"]
process = subprocess.Popen(words, stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
"""
HANGING = """\
import sys, time
from quantexp.training.tracking import upload
upload.ORPHAN_S = 0.5
upload.BACKENDS["wandb"].start = lambda *_: (print("starts", flush=True), time.sleep(600))
sys.exit(upload.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_upload_that_hangs_ends_soon_after_its_worker(tracked: Make) -> None:
    run = tracked()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, HANGING, str(run.folder.root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        assert psutil.pid_exists(pid), "a job's end is still to be told to the tracker"
        worker.kill()
    until = time.monotonic() + 120
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_unreadable_record_does_not_fail_the_upload(tracked: Make) -> None:
    run, server = tracked(), Server()
    run.folder.delivery("wandb").write_text("{")
    write_metrics(run, 1)
    write_state(run)
    assert Upload(server, run).follow(lambda: True)
    assert server.iterations == [1]


def test_record_is_read_back(tmp_path: Path) -> None:
    delivery = Delivery("https://here", "abc", 7, True, "")
    delivery.write(tmp_path / "wandb.json")
    assert Delivery.read(tmp_path / "wandb.json") == delivery


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"another": "version"}'])
def test_invalid_record_is_replaced_by_a_new_one(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "wandb.json"
    if text is not None:
        file.write_text(text)
    assert Delivery.read(file) == Delivery()


def test_error_is_one_line_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    error = ConnectionError("https://me:password@there refuses hf_aSecretOfTheHub\nand more")
    assert error_line(error) == "ConnectionError: https://there refuses <HF_TOKEN>"
    assert error_line(TimeoutError()) == "TimeoutError: "


def test_long_error_is_cut() -> None:
    assert error_line(ValueError("x" * 999)) == f"ValueError: {'x' * 225}..."


def test_metrics_that_are_not_there_yet_are_read_later(tracked: Make) -> None:
    run, server = tracked(), Server()
    upload_ = Upload(server, run)
    assert upload_.send()
    assert server.iterations == []
    write_metrics(run, 1)
    assert upload_.send()
    upload_.close()
    assert server.iterations == [1]


def test_file_that_is_moved_away_is_read_to_its_end(tracked: Make) -> None:
    """Another attempt does this when it sets this one aside."""
    run, server = tracked(), Server()
    upload_ = Upload(server, run)
    write_metrics(run, 1)
    upload_.send()
    write_metrics(run, 2)
    run.folder.metrics.rename(run.folder.metrics.with_name("moved"))
    write_metrics(run, 9)
    upload_.send()
    upload_.close()
    assert server.iterations == [1, 2]


def test_lines_of_another_version_are_skipped_however_many_they_are(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LINES", 2)
    run, server = tracked(), Server()
    run.folder.metrics.write_text('{"iteration": 1}\n' * 5)
    write_metrics(run, 4)
    upload_ = Upload(server, run)
    upload_.send()
    upload_.close()
    assert server.iterations == [4]

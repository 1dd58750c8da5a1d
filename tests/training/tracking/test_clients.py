"""The trackers in a worker: whatever they do, the worker continues and ends without delay."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from quantexp.runs.status import State
from quantexp.training.tracking import clients
from quantexp.training.tracking.clients import Tracking
from quantexp.training.tracking.events import TrackedRun
from quantexp.training.tracking.upload import Delivery

from .conftest import line

Make = Callable[..., TrackedRun]
WANDB = ("tracking.tensorboard=false", "tracking.wandb.enabled=true")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[subprocess.Popen[bytes]]]:
    """Replace the upload with a program whose argument is the upload's record."""

    def put(program: str) -> list[subprocess.Popen[bytes]]:
        started: list[subprocess.Popen[bytes]] = []

        def start(self: Tracking, backend: Any) -> subprocess.Popen[bytes]:
            file = str(self._folder.delivery(backend.NAME))
            started.append(subprocess.Popen([sys.executable, "-c", program, file]))
            return started[-1]

        monkeypatch.setattr(Tracking, "_upload", start)
        return started

    return put


def start_tracking(run: TrackedRun) -> Tracking:
    tracking = Tracking(run.folder, run.experiment)
    tracking.start(run.created)
    return tracking


def test_run_without_trackers_reports_nothing(tracked: Make) -> None:
    tracking = start_tracking(tracked("tracking.tensorboard=false"))
    tracking.log(line(1))
    tracking.end(State.COMPLETED, "")
    assert tracking.report() == {}


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


RECORDS = """\
import json, sys, time
open(sys.argv[1], "w").write(json.dumps({"where": "https://there", "id": "theirs", "iteration": 5, "ended": True}))
"""


def test_report_has_the_record_of_the_upload(
    tracked: Make, stand_in: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    stand_in(RECORDS)
    tracking = start_tracking(tracked(*WANDB))
    tracking.end(State.COMPLETED, "")
    assert tracking.report() == {
        "wandb": {
            "where": "https://there",
            "id": "theirs",
            "iteration": 5,
            "ended": True,
            "trouble": "",
        }
    }


def test_upload_that_dies_is_reported_during_the_run(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(clients, "LOOK_S", 0.0)
    started = stand_in("import sys; sys.exit(3)")
    run = tracked(*WANDB)
    tracking = start_tracking(run)
    started[0].wait()
    trouble = tracking.report()["wandb"]["trouble"]
    assert trouble == f"its process ended with exit code 3; see {run.folder.tracker_log('wandb')}"
    tracking.end(State.COMPLETED, "")
    assert caplog.text.count("tracking.wandb: its process ended with exit code 3") == 1


HANGS = """\
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


@pytest.mark.parametrize("state", [State.COMPLETED, State.CANCELLED])
def test_upload_that_hangs_is_ended_with_its_children(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
    state: State,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 1.0 if state is State.COMPLETED else 600.0)
    monkeypatch.setattr(clients, "SHORT_PATIENCE_S", 1.0)
    started = stand_in(HANGS)
    run = tracked(*WANDB)
    tracking = start_tracking(run)
    process = psutil.Process(started[0].pid)
    while not (children := process.children()):
        time.sleep(0.05)
    tracking.end(state, "")
    assert started[0].returncode == -9
    psutil.wait_procs(children, 120)
    assert not any(child.is_running() for child in children)
    report = tracking.report()["wandb"]
    assert report["trouble"] == "not everything sent within 1 s"
    assert Delivery.read(run.folder.delivery("wandb")).trouble == report["trouble"]


def test_last_record_of_a_killed_upload_remains(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.3)
    stand_in(HANGS)
    run = tracked(*WANDB)
    file, kill = run.folder.delivery("wandb"), clients._kill

    def record_and_kill(process: subprocess.Popen[bytes]) -> None:
        Delivery(iteration=7).write(file)
        kill(process)

    monkeypatch.setattr(clients, "_kill", record_and_kill)
    start_tracking(run).end(State.COMPLETED, "")
    recorded = Delivery.read(file)
    assert recorded.iteration == 7
    assert recorded.trouble == "not everything sent within 0 s"


def test_worker_waits_only_briefly_for_a_tracker_in_trouble(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 600.0)
    monkeypatch.setattr(clients, "TROUBLED_PATIENCE_S", 0.5)
    stand_in(HANGS)
    run = tracked(*WANDB)
    Delivery(trouble="CommError: network away").write(run.folder.delivery("wandb"))
    tracking = start_tracking(run)
    tracking.end(State.COMPLETED, "")
    assert tracking.report()["wandb"]["trouble"] == "CommError: network away"


def test_upload_is_detached_from_the_terminal_and_inherits_nothing_of_the_worker(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[str], dict[str, Any]]] = []
    popen = subprocess.Popen

    def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        calls.append((words, options))
        return popen([sys.executable, "-c", "pass"])

    monkeypatch.setattr(subprocess, "Popen", start)
    run = tracked(*WANDB)
    start_tracking(run).end(State.COMPLETED, "")
    ((words, options),) = calls
    assert words[1:3] == ["-m", "quantexp.training.tracking.upload"]
    assert words[3:] == ["wandb", str(run.folder.root), "--with-parent"]
    assert options["start_new_session"]
    assert options["stdin"] == subprocess.DEVNULL
    assert not {"pass_fds", "close_fds", "shell", "env"} & set(options)


@pytest.mark.slow
def test_upload_of_the_real_kind_starts_and_reports_its_trouble(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B without an API key: its own message, and a worker that ends within seconds."""
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    run = tracked(*WANDB, "tracking.wandb.mode=online")
    monkeypatch.setenv("HOME", str(run.folder.root))
    run.folder.metrics.write_text(json.dumps(line(1)) + "\n")
    tracking = start_tracking(run)
    deadline = time.monotonic() + 60
    while not (report := tracking.report()["wandb"])["trouble"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert report["trouble"].startswith("UsageError: No API key configured")
    assert report["iteration"] == 0
    started = time.monotonic()
    tracking.end(State.COMPLETED, "")
    assert time.monotonic() - started < clients.PATIENCE_S
    assert "No API key configured" in run.folder.tracker_log("wandb").read_text()

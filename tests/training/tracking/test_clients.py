"""The trackers in a worker: whatever they do, it continues, and soon ends."""

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
    """Puts a program in the upload's place; its argument is the upload's record."""

    def put(program: str) -> list[subprocess.Popen[bytes]]:
        started: list[subprocess.Popen[bytes]] = []

        def start(self: Tracking, backend: Any) -> subprocess.Popen[bytes]:
            file = str(self._folder.delivery(backend.NAME))
            started.append(subprocess.Popen([sys.executable, "-c", program, file]))
            return started[-1]

        monkeypatch.setattr(Tracking, "_upload", start)
        return started

    return put


def begun(run: TrackedRun) -> Tracking:
    tracking = Tracking(run.folder, run.experiment)
    tracking.start(run.created)
    return tracking


def test_run_without_trackers_reports_nothing(tracked: Make) -> None:
    tracking = begun(tracked("tracking.tensorboard=false"))
    tracking.log(line(1))
    tracking.end(State.COMPLETED, "")
    assert tracking.report() == {}


def test_report_says_where_and_how_far(tracked: Make) -> None:
    tracking = begun(tracked())
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


def test_tracker_that_cannot_begin_is_said_once_and_left_out(
    tracked: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = tracked()
    run.folder.tensorboard.write_text("in the way")
    tracking = begun(run)
    tracking.log(line(1))
    tracking.end(State.COMPLETED, "")
    told = tracking.report()["tensorboard"]
    assert told["trouble"].startswith("FileExistsError: ")
    assert (told["where"], told["iteration"], told["ended"]) == ("", 0, False)
    (message,) = caplog.messages
    assert message.startswith("tracking.tensorboard: FileExistsError: ")
    assert message.endswith("; the run continues")


def test_what_is_said_of_trouble_holds_no_secret(
    tracked: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    run = tracked()

    def fails(*_: object) -> None:
        raise OSError("https://me:password@there refuses hf_aSecretOfTheHub")

    monkeypatch.setattr("quantexp.training.tracking.tensorboard.start", fails)
    trouble = begun(run).report()["tensorboard"]["trouble"]
    assert trouble == "OSError: https://there refuses <HF_TOKEN>"
    assert trouble in caplog.text


def test_interrupt_is_not_a_trackers_failure(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = begun(tracked())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantexp.training.tracking.event_file.EventFile.scalars", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tracking.log(line(1))
    monkeypatch.undo()
    tracking.end(State.CANCELLED, "interrupted")
    assert tracking.report()["tensorboard"]["ended"]


TELLS = """\
import json, sys, time
open(sys.argv[1], "w").write(json.dumps({"where": "https://there", "id": "theirs", "iteration": 5, "ended": True}))
"""


def test_record_of_an_upload_is_taken_over(
    tracked: Make, stand_in: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    stand_in(TELLS)
    tracking = begun(tracked(*WANDB))
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


def test_upload_that_dies_is_said_while_the_run_works(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(clients, "LOOK_S", 0.0)
    started = stand_in("import sys; sys.exit(3)")
    run = tracked(*WANDB)
    tracking = begun(run)
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
def test_upload_that_hangs_is_ended_with_all_it_started(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
    state: State,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 1.0 if state is State.COMPLETED else 600.0)
    monkeypatch.setattr(clients, "SHORT_PATIENCE_S", 1.0)
    started = stand_in(HANGS)
    run = tracked(*WANDB)
    tracking = begun(run)
    process = psutil.Process(started[0].pid)
    while not (below := process.children()):
        time.sleep(0.05)
    tracking.end(state, "")
    assert started[0].returncode == -9
    psutil.wait_procs(below, 10)
    assert not any(child.is_running() for child in below)
    told = tracking.report()["wandb"]
    assert told["trouble"] == "not everything sent within 1 s"
    assert Delivery.read(run.folder.delivery("wandb")).trouble == told["trouble"]


def test_last_record_of_an_upload_that_is_killed_is_kept(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.3)
    stand_in(HANGS)
    run = tracked(*WANDB)
    file, kill = run.folder.delivery("wandb"), clients._kill

    def record_and_kill(process: subprocess.Popen[bytes]) -> None:
        Delivery(iteration=7, offset=70).write(file)
        kill(process)

    monkeypatch.setattr(clients, "_kill", record_and_kill)
    begun(run).end(State.COMPLETED, "")
    recorded = Delivery.read(file)
    assert (recorded.iteration, recorded.offset) == (7, 70)
    assert recorded.trouble == "not everything sent within 0 s"


def test_tracker_in_trouble_is_not_waited_for_long(
    tracked: Make,
    stand_in: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 600.0)
    monkeypatch.setattr(clients, "TROUBLED_PATIENCE_S", 0.5)
    stand_in(HANGS)
    run = tracked(*WANDB)
    Delivery(trouble="CommError: network away").write(run.folder.delivery("wandb"))
    tracking = begun(run)
    tracking.end(State.COMPLETED, "")
    assert tracking.report()["wandb"]["trouble"] == "CommError: network away"


def test_upload_is_out_of_reach_of_the_terminal_and_holds_nothing_of_the_worker(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, Any]]] = []
    popen = subprocess.Popen

    def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        asked.append((words, options))
        return popen([sys.executable, "-c", "pass"])

    monkeypatch.setattr(subprocess, "Popen", start)
    run = tracked(*WANDB)
    begun(run).end(State.COMPLETED, "")
    ((words, options),) = asked
    assert words[1:3] == ["-m", "quantexp.training.tracking.upload"]
    assert words[3:] == ["wandb", str(run.folder.root), "--with-parent"]
    assert options["start_new_session"]
    assert options["stdin"] == subprocess.DEVNULL
    assert not {"pass_fds", "close_fds", "shell", "env"} & set(options)


@pytest.mark.slow
def test_upload_of_the_real_kind_starts_and_reports_its_trouble(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B without an API key: its own words, and a worker that is done in seconds."""
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    run = tracked(*WANDB, "tracking.wandb.mode=online")
    monkeypatch.setenv("HOME", str(run.folder.root))
    run.folder.metrics.write_text(json.dumps(line(1)) + "\n")
    tracking = begun(run)
    deadline = time.monotonic() + 60
    while not (told := tracking.report()["wandb"])["trouble"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert told["trouble"].startswith("UsageError: No API key configured")
    assert told["iteration"] == 0
    started = time.monotonic()
    tracking.end(State.COMPLETED, "")
    assert time.monotonic() - started < clients.PATIENCE_S
    assert "No API key configured" in run.folder.tracker_log("wandb").read_text()

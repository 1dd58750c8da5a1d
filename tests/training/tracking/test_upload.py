"""The upload after a run: what a tracker has not received is sent once, and recorded; and errors in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantexp.runs.lock import take_lock
from quantexp.runs.status import State, Status, read_status
from quantexp.training.tracking import upload
from quantexp.training.tracking.events import TrackedRun
from quantexp.training.tracking.trackers import BACKENDS
from quantexp.training.tracking.upload import error_line

from .conftest import line
from .memory import Memory

Make = Callable[..., TrackedRun]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setitem(BACKENDS, "wandb", memory)
    return memory


def ended(tracked: Make, state: State, reason: str = "", **tracking: dict[str, Any]) -> TrackedRun:
    """A run of three iterations."""
    created = "2026-01-02T03:04:05+00:00"
    run = tracked(status=Status(state, reason, created=created, tracking=tracking))
    run.folder.metrics.write_text("".join(json.dumps(line(i)) + "\n" for i in (1, 2, 3)))
    return run


def send(run: TrackedRun) -> tuple[int, dict[str, Any]]:
    """Upload a run; the exit code and the record."""
    code = upload.main(["wandb", str(run.folder.root)])
    status = read_status(run.folder.status)
    assert status is not None
    return code, status.tracking.get("wandb", {})


def test_rest_is_sent_and_recorded_and_nothing_twice(tracked: Make, remote: Memory) -> None:
    earlier = {"where": "https://there", "id": "theirs", "iteration": 1, "trouble": "OSError: away"}
    run = ended(tracked, State.FAILED, "loss nan", wandb=earlier)
    record = {**earlier, "where": remote.where, "iteration": 3, "ended": True, "trouble": ""}
    assert send(run) == (0, record)
    assert send(run) == (0, record)
    assert (remote.starts, remote.iterations) == (["theirs"], [2, 3])
    assert remote.ends == [(State.FAILED, "loss nan")]


def test_refusal_is_printed_recorded_and_the_exit_code(
    tracked: Make, remote: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise ConnectionError("away\nfor long")

    remote.before = refuse
    code, record = send(ended(tracked, State.COMPLETED))
    assert (code, record["trouble"], record["ended"]) == (1, "ConnectionError: away", False)
    assert capsys.readouterr().err == "ConnectionError: away\n"


def test_worker_that_was_killed_is_a_failure(tracked: Make, remote: Memory) -> None:
    assert send(ended(tracked, State.RUNNING))[0] == 0
    assert remote.ends == [(State.FAILED, "the worker ended without recording a result")]


def test_run_that_works_is_left_alone(
    tracked: Make, remote: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tracked, State.RUNNING)
    lock = take_lock(run.folder)
    assert send(run) == (1, {})
    os.close(lock)
    assert "is in use by another process; wait for it, or stop it first" in capsys.readouterr().err
    assert remote.starts == []


def test_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upload.main(["wandb", str(tmp_path)]) == 1
    expected = "has no status.json: it is not a run folder, or its run never started\n"
    assert capsys.readouterr().err.endswith(expected)
    assert list(tmp_path.iterdir()) == []


def test_error_is_one_line_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aSecretOfTheHub")
    error = ConnectionError("https://me:password@there refuses hf_aSecretOfTheHub\nand more")
    assert error_line(error) == "ConnectionError: https://there refuses <HF_TOKEN>"
    assert error_line(TimeoutError()) == "TimeoutError: "


def test_long_error_is_cut() -> None:
    assert error_line(ValueError("x" * 999)) == f"ValueError: {'x' * 225}..."

"""status.json, whole at every moment."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.runs.status import (
    Phase,
    State,
    Status,
    finish,
    now,
    read_json,
    read_status,
    write_json,
    write_status,
)


def test_status_comes_back_as_it_was_written(tmp_path: Path) -> None:
    status = Status(State.FAILED, "no memory", iteration=3, iterations=8, pid=1)
    write_status(tmp_path / "status.json", status)
    assert read_status(tmp_path / "status.json") == status
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
    assert status.updated is not None


def test_a_phase_of_another_version_is_none(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    file.write_text('{"state": "running", "phase": "setting up"}')
    assert read_status(file) == Status(State.RUNNING, phase=Phase.NONE)
    file.write_text('{"state": "running", "phase": "drawing"}')
    assert read_status(file) == Status(State.RUNNING, phase=Phase.DRAWING)


def test_nothing_goes_on_or_waits_after_the_end() -> None:
    capture = {"tensors": 64, "queue_bytes": 8_400_000, "bytes_per_s": 5e8}
    status = Status(
        State.RUNNING,
        phase=Phase.WRITING,
        phase_since=now(),
        current_iteration=8,
        micro_batch=2,
        capture=capture,
    )
    finish(status, State.FAILED, "no room")
    assert (status.state, status.reason, status.phase) == (State.FAILED, "no room", Phase.NONE)
    assert status.capture == {"tensors": 64, "queue_bytes": 0, "bytes_per_s": 0.0}
    assert (status.phase_since, status.current_iteration, status.micro_batch) == (None, None, None)
    assert status.finished is not None
    finish(never := Status(), State.CANCELLED, "")
    assert never.capture == {}


def test_states_are_the_contracts() -> None:
    assert [state.value for state in State] == [
        "pending",
        "running",
        "completed",
        "failed",
        "preempted",
        "cancelled",
    ]


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", [1])
    write_json(tmp_path / "a.json", [2])
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == [2]


def test_no_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path / "status.json") is None


@pytest.mark.parametrize("text", ["{", ""])
def test_broken_status_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(RunError, match=r"status\.json cannot be read: "):
        read_status(tmp_path / "status.json")


@pytest.mark.parametrize("text", ["[]", "{}", '{"state": "odd"}', '{"state": "failed", "x": 1}'])
def test_status_of_another_version_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(RunError, match=r"status\.json is not a status of this version: "):
        read_status(tmp_path / "status.json")


def test_times_are_utc() -> None:
    assert datetime.fromisoformat(now()).utcoffset() == timedelta(0)


@pytest.mark.parametrize("text", [None, "{"])
def test_json_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "precision.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RunError, match=r"precision\.json cannot be read: "):
        read_json(file)

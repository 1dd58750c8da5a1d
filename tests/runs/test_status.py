"""status.json is whole at every moment."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from quantexp.errors import RunError, UnreadableError
from quantexp.reading import json_files
from quantexp.runs.precision import read_precision
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


def test_ended_status_has_no_phase_and_no_pending_bytes() -> None:
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


def test_states_are_the_documented_ones() -> None:
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ", line 1: unexpected end of data"),
        ('{"state":\n"failed", x}', ", line 2: "),
        ("[]", ": it must be keys with values, got a list"),
        ("{}", ": state is missing"),
        ('{"state": "odd"}', ": state must be one of pending, running, .*, got 'odd'"),
        ('{"state": "failed", "x": 1}', ": x is a key of another version"),
        ('{"state": "failed", "iteration": "2"}', ": iteration must be a whole number from 0, got"),
        ('{"state": "failed", "updated": "then"}', ": updated must be a time such as 2026-"),
        ('{"state": "failed", "created": "then"}', ": created must be a time, or empty, got"),
        ('{"state": "failed", "pid": 0}', ": pid must be a process id, got 0"),
        ('{"state": "failed", "capture": {"tensors": []}}', ": capture.tensors must be a whole"),
    ],
)
def test_damaged_status_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(RunError, match=rf"status\.json{words}"):
        read_status(tmp_path / "status.json")


def test_times_are_utc() -> None:
    assert datetime.fromisoformat(now()).utcoffset() == timedelta(0)


def test_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    with pytest.raises(RunError, match=r"precision\.json is missing"):
        read_json(file)
    file.write_text("{")
    with pytest.raises(RunError, match=r"precision\.json, line 1: unexpected end of data"):
        read_json(file)


def test_damaged_parts_of_a_slot_are_named(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    file.write_text('{"entries": [{"format": "mxfp4_e2m1", "parts": [{"take": "mean"}]}]}')
    with pytest.raises(UnreadableError, match=r"precision\.json: entries\[0\]\.parts\[0\]"):
        read_precision(file)


def test_reason_of_an_end_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "not-a-real-token")
    status = Status()
    finish(status, State.FAILED, "401 for not-a-real-token of https://me:word@host")
    assert status.reason == "401 for <SOME_TOKEN> of https://host"


def test_half_of_a_character_is_written_as_its_code(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    content = ["a\udc80b", "\U0001f600", "\\udc80", "\ud83d", "\n\\"]
    write_json(file, content)
    assert json_files.read_json(file, list[str]) == [
        r"a\udc80b",
        "\U0001f600",
        r"\udc80",
        r"\ud83d",
        "\n\\",
    ]

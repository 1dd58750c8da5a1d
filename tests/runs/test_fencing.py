"""Only the newest of several starts of a job writes into the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.runs.fencing import TakenOverError, is_ours, own_start, require_ours, take_over
from quantexp.runs.paths import RunDir


def be(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    """Make this a process of that start."""
    monkeypatch.setenv("QUANTEXP_START", start)


def test_process_without_numbered_starts_may_always_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUANTEXP_START", raising=False)
    assert own_start() == ""
    require_ours(RunDir(tmp_path))


def test_later_start_takes_the_folder_from_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    be(monkeypatch, "7 0")
    assert not is_ours(run), "nobody's yet"
    take_over(run)
    require_ours(run)
    be(monkeypatch, "7 1")
    assert not is_ours(run)
    take_over(run)
    require_ours(run)
    be(monkeypatch, "7 0")
    with pytest.raises(TakenOverError):
        require_ours(run)


def test_start_of_another_job_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    be(monkeypatch, "7 1")
    take_over(run)
    be(monkeypatch, "8 1")
    assert not is_ours(run)


def test_handler_of_errors_does_not_catch_the_end_of_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be(monkeypatch, "7 0")
    assert not issubclass(TakenOverError, Exception)
    with pytest.raises(TakenOverError):
        require_ours(RunDir(tmp_path))

"""Of several starts of a job the newest alone writes into the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.runs.fencing import TakenOverError, is_ours, own_start, require_ours, take_over
from quantexp.runs.paths import RunDir


def be(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int | None) -> None:
    """Be a process of that start."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    if restarts is None:
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    else:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


def test_first_start_of_a_job_has_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "7", None)
    first = own_start()
    be(monkeypatch, "7", 0)
    assert own_start() == first
    be(monkeypatch, "7", 1)
    assert own_start() != first


def test_later_start_takes_the_folder_from_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    be(monkeypatch, "7", None)
    assert not is_ours(run), "nobody's yet"
    take_over(run)
    require_ours(run)
    be(monkeypatch, "7", 1)
    assert not is_ours(run)
    take_over(run)
    require_ours(run)
    be(monkeypatch, "7", None)
    with pytest.raises(TakenOverError):
        require_ours(run)


def test_start_of_another_job_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    be(monkeypatch, "7", 1)
    take_over(run)
    be(monkeypatch, "8", 1)
    assert not is_ours(run)


def test_what_catches_errors_does_not_go_on(tmp_path: Path) -> None:
    assert not issubclass(TakenOverError, Exception)
    with pytest.raises(TakenOverError):
        require_ours(RunDir(tmp_path))

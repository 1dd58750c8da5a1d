"""A run that waits is given its reason; any other is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quantexp_launchers.local.hold_back import hold_back

from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status, write_status


def reason(run: RunDir) -> str:
    status = read_status(run.status)
    assert status is not None
    return status.reason


def test_waiting_run_is_given_the_reason(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_status(run.status, Status())
    hold_back(run, "for a reason")
    assert reason(run) == "for a reason"


@pytest.mark.parametrize(
    "status", [Status(State.COMPLETED), Status(State.PENDING, started="2026-01-01")]
)
def test_run_that_has_started_is_left_alone(tmp_path: Path, status: Status) -> None:
    run = RunDir(tmp_path)
    write_status(run.status, status)
    hold_back(run, "for a reason")
    assert reason(run) == ""


def test_run_of_another_process_is_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_status(run.status, Status())
    lock = take_lock(run)
    hold_back(run, "for a reason")
    os.close(lock)
    assert reason(run) == ""


def test_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    hold_back(RunDir(tmp_path / "gone"), "for a reason")
    assert not (tmp_path / "gone").exists()

"""The end of a run that could not record it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from quantexp.runs.outcome import record_exit, record_interruption
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import ENDED_SILENTLY, RankRecord, write_record
from quantexp.runs.status import State, Status, read_status, write_status


@pytest.mark.parametrize(
    ("num_processes", "before", "after"),
    [
        (1, State.COMPLETED, State.COMPLETED),
        (1, State.FAILED, State.FAILED),
        (2, State.COMPLETED, State.COMPLETED),
        (2, State.FAILED, State.CANCELLED),  # it failed because of the end of another rank
        (2, State.RUNNING, State.CANCELLED),
    ],
)
def test_interruption_changes_only_unfinished_runs(
    tmp_path: Path, num_processes: int, before: State, after: State
) -> None:
    run = RunDir(tmp_path)
    write_status(run.status, Status(before))
    record_interruption(run, num_processes)
    status = read_status(run.status)
    assert status is not None
    assert status.state is after


def test_ranks_that_ended_because_torchrun_was_killed_have_failed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank in range(2):
        write_record(run, rank, RankRecord(1, State.CANCELLED, "interrupted"))
    record_exit(run, 2, -signal.SIGKILL)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert status.reason == (
        f"torchrun was ended by SIGKILL (out of memory?); see {run.torchrun_log}"
    )


def test_interrupted_ranks_make_the_run_cancelled(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank in range(2):
        write_record(run, rank, RankRecord(1, State.CANCELLED, "interrupted"))
    record_exit(run, 2, 1)
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.reason) == (State.CANCELLED, "interrupted")


def test_signal_without_a_name_is_recorded_by_its_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_status(run.status, Status(State.RUNNING))
    record_exit(run, 1, -35)
    status = read_status(run.status)
    assert status is not None
    assert status.reason.startswith("the worker was ended by signal 35; see ")


def test_error_of_a_rank_comes_before_the_kill_of_torchrun(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    write_status(run.status, Status(State.RUNNING))
    write_record(
        run,
        0,
        RankRecord(1, State.FAILED, "ValueError: true cause", finished="2026-01-01T00:00:00+00:00"),
    )
    write_record(
        run, 1, RankRecord(2, State.FAILED, ENDED_SILENTLY, finished="2026-01-01T00:00:05+00:00")
    )
    record_exit(run, 2, -signal.SIGKILL)
    status = read_status(run.status)
    assert status is not None
    assert (
        status.reason.startswith("ValueError: true cause")
        or "rank 0: ValueError: true cause" in status.reason
    )

"""What the ledger adds to the launchers' answers, and what it does without one."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

import pytest

from quantexp.errors import RunError
from quantexp.launch.ledger.standing import settle, standing, standings
from quantexp.runs.lock import is_locked, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, Status, write_status
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line
from tests.recorded import status_of

HERE = platform.node()


def test_folder_without_a_status_is_unreadable_and_does_not_affect_the_others(
    make_run: MakeRun,
) -> None:
    broken, empty, whole = make_run("a-1"), make_run("b-2"), make_run("c-3", State.COMPLETED)
    broken.status.write_text("{")
    empty.status.unlink()
    entries = standings([broken, empty, whole])
    assert [each.state for each in entries] == [None, None, State.COMPLETED]
    assert entries[0].reason.startswith("status.json, line 1: "), "its name stands beside it"
    assert entries[1].reason == "it has no status.json: it was never started"


def test_run_without_its_configuration_is_broken_and_does_not_affect_the_others(
    make_run: MakeRun,
) -> None:
    broken, whole = make_run("a-1", State.COMPLETED), make_run("b-2", State.COMPLETED)
    broken.config.unlink()
    entries = standings([broken, whole])
    assert [each.state for each in entries] == [None, State.COMPLETED]
    assert entries[0].reason == "broken: its config.yaml is gone; restore it, or delete the folder"


def test_completed_and_local_runs_need_no_query(slurm: FakeSlurm, make_run: MakeRun) -> None:
    standings(
        [
            make_run("a-1", State.COMPLETED, submission=SUBMISSION, job_id="7_4"),
            make_run("b-2", host=HERE),
        ]
    )
    assert slurm.calls() == []


def test_run_of_a_launcher_that_is_not_installed_here_keeps_its_recorded_state(
    make_run: MakeRun,
) -> None:
    entry = standing(make_run(launcher="pbs", job_id="12"))
    assert (entry.state, entry.alive) == (State.RUNNING, True)
    assert entry.note is not None
    assert entry.note.startswith(
        "its launcher was not queried: launcher.kind must be one of local, slurm, got 'pbs'"
    )


def test_failing_launcher_does_not_affect_the_others(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RunError("the scheduler is down")

    monkeypatch.setattr("quantexp_launchers.slurm.launcher.SlurmLauncher.standings", fail)
    submitted, whole = make_run("a-1", launcher="slurm"), make_run("b-2", State.COMPLETED)
    entries = standings([submitted, whole])
    assert entries[0].note == "its launcher was not queried: the scheduler is down"
    assert [each.state for each in entries] == [State.RUNNING, State.COMPLETED]


def ended(slurm: FakeSlurm, make_run: MakeRun, **fields: object) -> RunDir:
    slurm.answer("squeue", queue_line("7_4", "TIMEOUT", end="1795238998", limit="10:00"))
    return make_run(submission=SUBMISSION, task=4, iteration=3, phase=Phase.TRAINING, **fields)


def test_end_is_recorded_with_the_schedulers_time_and_job(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = ended(slurm, make_run)
    run.reserve.write_bytes(b"0")
    settled = settle(standing(run))
    status = status_of(run)
    assert (status.state, status.phase, status.iteration) == (State.PREEMPTED, "", 3)
    assert status.reason.startswith("the time limit of 10 min was reached at iteration 3 of 8")
    assert status.job_id == "7_4"
    assert status.finished is not None
    assert datetime.fromisoformat(status.finished) == datetime.fromtimestamp(1795238998, UTC)
    assert not run.reserve.exists()
    assert not is_locked(run)
    assert settled.state is State.PREEMPTED
    assert not settled.is_unrecorded_end
    assert standing(run).reason == settled.reason


def test_end_of_a_vanished_local_run_is_recorded(make_run: MakeRun) -> None:
    run = make_run(host="far", pid=7)
    settle(replace(standing(run), state=State.PREEMPTED, alive=False, reason="gone"))
    assert (status_of(run).state, status_of(run).reason) == (State.PREEMPTED, "gone")
    assert status_of(run).finished is not None


def test_living_or_recorded_runs_are_left_alone(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "RUNNING"))
    runs = [
        make_run("a-1", submission=SUBMISSION, job_id="7_4"),
        make_run("b-2", State.COMPLETED),
        make_run("c-3", State.PENDING, submission=SUBMISSION, job_id="8_4"),
    ]
    before = [run.status.read_text() for run in runs]
    for run in runs:
        settle(standing(run))
    assert [run.status.read_text() for run in runs] == before


def test_folder_locked_by_another_process_is_left_alone(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = ended(slurm, make_run)
    entry = standing(run)
    lock = take_lock(run)
    assert settle(entry).is_unrecorded_end
    assert status_of(run).state is State.RUNNING
    os.close(lock)


def test_end_recorded_by_the_run_meanwhile_counts(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = ended(slurm, make_run)
    entry = standing(run)
    write_status(run.status, Status(State.COMPLETED))
    settle(entry)
    assert status_of(run).state is State.COMPLETED


def test_run_in_a_read_only_folder_is_settled_without_a_record(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = ended(slurm, make_run)
    entry = standing(run)
    run.lock.mkdir()  # cannot be opened for writing, like another user's file
    assert settle(entry).state is State.PREEMPTED
    assert status_of(run).state is State.RUNNING

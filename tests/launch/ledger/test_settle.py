"""Settling makes status.json agree with the scheduler and disturbs no other process."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime

from quantexp.launch.ledger.settle import settle
from quantexp.launch.ledger.standing import standing
from quantexp.runs.lock import is_locked, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, Status, write_status
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line
from tests.recorded import status_of


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

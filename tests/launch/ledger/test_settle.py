"""status.json agrees with the scheduler afterwards, and no other process is disturbed."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime

from quantexp.launch.ledger.settle import settle
from quantexp.launch.ledger.standing import standing
from quantexp.runs.lock import is_locked, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, Status, read_status, write_status
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line


def told(run: RunDir) -> Status:
    status = read_status(run.status)
    assert status is not None
    return status


def ended(slurm: FakeSlurm, make_run: MakeRun, **fields: object) -> RunDir:
    slurm.answer("squeue", queue_line("7_4", "TIMEOUT", end="1795238998", limit="10:00"))
    return make_run(submission=SUBMISSION, task=4, iteration=3, phase=Phase.TRAINING, **fields)


def test_end_is_written_with_the_schedulers_time_and_number(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = ended(slurm, make_run)
    run.reserve.write_bytes(b"0")
    found = settle(standing(run))
    status = told(run)
    assert (status.state, status.phase, status.iteration) == (State.PREEMPTED, "", 3)
    assert status.reason.startswith("the time limit of 10 min was reached at iteration 3 of 8")
    assert status.job_id == "7_4"
    assert status.finished is not None
    assert datetime.fromisoformat(status.finished) == datetime.fromtimestamp(1795238998, UTC)
    assert not run.reserve.exists()
    assert not is_locked(run)
    assert found.state is State.PREEMPTED
    assert not found.is_unrecorded_end
    assert standing(run).reason == found.reason


def test_local_run_that_is_gone_is_written_down(make_run: MakeRun) -> None:
    run = make_run(host="far", pid=7)
    settle(replace(standing(run), state=State.PREEMPTED, alive=False, reason="gone"))
    assert (told(run).state, told(run).reason) == (State.PREEMPTED, "gone")
    assert told(run).finished is not None


def test_what_runs_or_was_told_is_left_alone(slurm: FakeSlurm, make_run: MakeRun) -> None:
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


def test_folder_that_another_process_has_is_left_to_it(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = ended(slurm, make_run)
    found = standing(run)
    lock = take_lock(run)
    assert settle(found).is_unrecorded_end
    assert told(run).state is State.RUNNING
    os.close(lock)


def test_what_a_run_said_meanwhile_counts(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = ended(slurm, make_run)
    found = standing(run)
    write_status(run.status, Status(State.COMPLETED))
    settle(found)
    assert told(run).state is State.COMPLETED


def test_folder_that_cannot_be_written_is_shown_all_the_same(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = ended(slurm, make_run)
    found = standing(run)
    run.lock.mkdir()  # as little to be opened for writing as another user's file
    assert settle(found).state is State.PREEMPTED
    assert told(run).state is State.RUNNING

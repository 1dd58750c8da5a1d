"""Ending runs: jobs, processes, and runs that cannot be ended."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
from quantexp_launchers.slurm import scheduler

from quantexp.launch.ledger import cancel as module
from quantexp.launch.ledger.cancel import Cancelled, cancel
from quantexp.launch.ledger.standing import CANCELLED, standings
from quantexp.runs.fencing import Claim
from quantexp.runs.lock import hold
from quantexp.runs.paths import RunDir, RunsRoot, SweepFiles
from quantexp.runs.status import State, read_status, write_json
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line

#: A run of this machine: takes the lock, records that it runs, and on a signal ends as argv[2] says.
RUNS = """
import signal, sys, time
from pathlib import Path
from quantexp.runs.lock import take_lock
from quantexp.runs.lock import hold
from quantexp.runs.paths import RunDir, RunsRoot, SweepFiles
from quantexp.runs.status import State, read_status, write_json, write_status
run = RunDir(Path(sys.argv[1]))
lock = take_lock(run)
def end(*_):
    if sys.argv[2] == "stays":
        return
    if sys.argv[2] != "silent":
        status = read_status(run.status)
        status.state, status.reason = State(sys.argv[2]), "interrupted"
        write_status(run.status, status)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("runs", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "PATIENCE_S", 120.0)
    monkeypatch.setattr(module, "APPEARANCE_S", 0.5)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def local(
    make_run: MakeRun, processes: list[subprocess.Popen[bytes]], name: str, how: str
) -> RunDir:
    run = make_run(name, host=platform.node(), pid=1)
    command = [sys.executable, "-c", RUNS, str(run.root), how, "quantexp.training.worker"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    processes.append(process)
    return run


def state_and_reason(run: RunDir) -> tuple[State, str]:
    status = read_status(run.status)
    assert status is not None
    return status.state, status.reason


def submitted(make_run: MakeRun, task: int, state: State = State.PENDING) -> RunDir:
    values = {"submission": SUBMISSION, "task": task, "job_id": f"7_{task}"}
    return make_run(f"m_d_s{task}-1", state, **values)


def ends_jobs(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Let squeue print `after` once scancel has run."""
    real = scheduler.cancel

    def cancel_jobs(ids: list[str]) -> None:
        real(ids)
        slurm.answer("squeue", after)

    monkeypatch.setattr(scheduler, "cancel", cancel_jobs)


def test_jobs_are_ended_in_one_call_and_recorded(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer(
        "squeue",
        queue_line("7_0", "RUNNING", nodes="n1") + queue_line("7_1", "PENDING", reason="Priority"),
    )
    # A task that had not started is unknown afterwards.
    ends_jobs(slurm, monkeypatch, queue_line("7_0", "CANCELLED", nodes="n1"))
    runs = [submitted(make_run, 0, State.RUNNING), submitted(make_run, 1)]
    assert cancel(standings(runs)) == [
        Cancelled("m_d_s0-1", "job 7_0 running on n1", True),
        Cancelled("m_d_s1-1", "job 7_1 waiting (Priority)", True),
    ]
    assert slurm.calls("scancel") == [["scancel", "7_0", "7_1"]]
    assert [state_and_reason(run) for run in runs] == [(State.CANCELLED, CANCELLED)] * 2


def test_run_that_waits_after_a_preemption_is_cancelled(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", queue_line("7_0", "PENDING", reason="BeginTime", restarts=1))
    ends_jobs(slurm, monkeypatch, "")
    run = submitted(make_run, 0, State.PREEMPTED)
    (outcome,) = cancel(standings([run]))
    assert outcome.done
    assert state_and_reason(run) == (State.CANCELLED, CANCELLED)


def test_run_that_ended_by_itself_meanwhile_keeps_its_end(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", queue_line("7_0", "RUNNING", nodes="n1"))
    run = submitted(make_run, 0, State.RUNNING)
    entries = standings([run])
    slurm.answer("squeue", queue_line("7_0", "COMPLETED"))
    run.status.write_text(run.status.read_text().replace('"running"', '"completed"'))
    assert cancel(entries) == [
        Cancelled("m_d_s0-1", "job 7_0 running on n1: completed by itself", True)
    ]


def test_job_that_does_not_end_in_time_is_reported(slurm: FakeSlurm, make_run: MakeRun) -> None:
    module.PATIENCE_S = 0.1
    slurm.answer("squeue", queue_line("7_0", "RUNNING", nodes="n1"))
    run = submitted(make_run, 0, State.RUNNING)
    words = "job 7_0 running on n1: still running 0 s after the signal"
    assert cancel(standings([run])) == [Cancelled("m_d_s0-1", words, False)]


def test_scheduler_that_refuses_or_is_missing_is_reported(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", queue_line("7_0", "RUNNING"))
    slurm.answer("scancel", err="scancel: error: Access/permission denied\n", code=1)
    run = submitted(make_run, 0, State.RUNNING)
    (outcome,) = cancel(standings([run]))
    assert not outcome.done
    assert "scancel failed (exit code 1): scancel: error: Access/permission denied" in outcome.words
    monkeypatch.setenv("PATH", "/nowhere")
    (outcome,) = cancel(standings([run]))
    assert not outcome.done
    assert "no SLURM here" in outcome.words


def test_run_that_is_being_submitted_is_left_for_another_try(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    slurm.answer("squeue")
    run = make_run(state=State.PENDING, submission=SUBMISSION, task=0)
    (outcome,) = cancel(standings([run]))
    assert (outcome.done, outcome.words) == (False, "being submitted; try again")


def test_local_runs_are_ended_by_a_signal_to_their_workers(
    make_run: MakeRun, processes: list[subprocess.Popen[bytes]]
) -> None:
    runs = [local(make_run, processes, f"r-{how}", how) for how in ("cancelled", "silent")]
    outcomes = cancel(standings(runs))
    assert [outcome.done for outcome in outcomes] == [True, True]
    assert outcomes[0].words == "here, process 1"
    assert [process.wait() for process in processes] == [0, 0]
    assert [state_and_reason(run) for run in runs] == [(State.CANCELLED, CANCELLED)] * 2


def test_local_run_that_completes_nevertheless_is_reported(
    make_run: MakeRun, processes: list[subprocess.Popen[bytes]]
) -> None:
    (outcome,) = cancel(standings([local(make_run, processes, "r-1", "completed")]))
    assert (outcome.done, outcome.words) == (True, "here, process 1: completed by itself")


def test_local_run_that_does_not_end_is_reported(
    make_run: MakeRun, processes: list[subprocess.Popen[bytes]]
) -> None:
    module.PATIENCE_S = 0.2
    (outcome,) = cancel(standings([local(make_run, processes, "r-1", "stays")]))
    assert not outcome.done
    assert outcome.words == "here, process 1: still running 0 s after the signal"


def test_runs_that_have_not_started_are_marked(make_run: MakeRun) -> None:
    runs = [make_run(name, State.PENDING, host=platform.node()) for name in ("a-1", "b-2")]
    files = SweepFiles(RunsRoot(runs[0].root.parent).sweeps / "s.json")
    files.listing.parent.mkdir()
    write_json(files.listing, {"runs": [{"run": "a-1", "state": "pending"}]})
    lock = hold(files.lock)
    assert cancel(standings(runs)) == [
        Cancelled("a-1", "waiting in sweep s", True),
        Cancelled("b-2", "not started yet", True),
    ]
    os.close(lock)
    assert [state_and_reason(run) for run in runs] == [(State.CANCELLED, CANCELLED)] * 2


def test_run_of_another_machine_is_named_and_left_alone(make_run: MakeRun) -> None:
    run = make_run(host="far", pid=7)
    write_json(run.claim, vars(Claim("0123", "far", 7, "", "another boot", "another machine")))
    (outcome,) = cancel(standings([run]))
    assert not outcome.done
    assert outcome.words == (
        "far, process 7: it is not a process of yours here; on far, as the user who started it: quantexp cancel "
        f"{run.root}; if that machine is off, delete {run.claim}"
    )
    assert state_and_reason(run)[0] is State.RUNNING


def test_ended_runs_are_skipped(slurm: FakeSlurm, make_run: MakeRun) -> None:
    runs = [make_run("a-1", State.COMPLETED), submitted(make_run, 0, State.PREEMPTED)]
    slurm.answer("squeue", queue_line("7_0", "NODE_FAIL"))
    assert cancel(standings(runs)) == []
    assert slurm.calls("scancel") == []

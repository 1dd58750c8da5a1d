"""The state of a submitted run, from its folder and the scheduler together."""

from __future__ import annotations

import platform
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm.clients import ClientError
from quantexp_launchers.slurm.launcher import live_job

from quantexp.launch.backend import launcher_of
from quantexp.launch.ledger.standing import standing, standings
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import State, Status, read_status, write_json, write_status

from .conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line

HERE = platform.node()
NOWHERE = RunDir(Path("nowhere"))
#: No process has this number: the kernel's largest is 2^22.
NO_PID = 2**22 + 1


def submitted(make_run: MakeRun, state: State = State.RUNNING, **fields: object) -> RunDir:
    values = {"submission": SUBMISSION, "task": 4, "job_id": "7_4", "host": "n1", **fields}
    return make_run(state=state, **values)


def test_pending_run_has_the_reason_why_it_waits(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "PENDING", reason="Resources"))
    entry = standing(submitted(make_run, State.PENDING))
    assert (entry.state, entry.alive, entry.reason) == (State.PENDING, True, "")
    assert entry.where == "job 7_4 waiting (Resources)"


def test_running_run_has_its_node(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "RUNNING", nodes="n1"))
    for state in (State.PENDING, State.RUNNING, State.PREEMPTED):
        entry = standing(submitted(make_run, state, name=f"m_d_{state}-1"))
        assert (entry.state, entry.alive, entry.where) == (
            State.RUNNING,
            True,
            "job 7_4 running on n1",
        )


@pytest.mark.parametrize(
    ("state", "fields", "why"),
    [
        (State.RUNNING, {}, "by the scheduler"),
        (State.PREEMPTED, {"reason": "preempted by another job"}, "preempted by another job"),
        (State.PENDING, {"restarts": [{"reason": "node lost"}]}, "node lost"),
    ],
)
def test_requeued_run_is_pending(
    slurm: FakeSlurm, make_run: MakeRun, state: State, fields: dict[str, object], why: str
) -> None:
    slurm.answer("squeue", queue_line("7_4", "PENDING", reason="BeginTime", restarts=1))
    entry = standing(submitted(make_run, state, **fields))
    assert (entry.state, entry.alive) == (State.PENDING, True)
    assert (entry.reason, entry.where) == (f"requeued ({why})", "job 7_4 waiting (BeginTime)")


@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        ({"state": "CANCELLED"}, State.CANCELLED, "cancelled in the scheduler at iteration 3 of 8"),
        (
            {"state": "CANCELLED", "reason": "DependencyNeverSatisfied"},
            State.CANCELLED,
            "cancelled in the scheduler (DependencyNeverSatisfied) at iteration 3 of 8",
        ),
        (
            {"state": "TIMEOUT", "limit": "4:00:00"},
            State.PREEMPTED,
            "the time limit of 240 min was reached at iteration 3 of 8; it will begin again at its first iteration, "
            "so give launcher.time_min more to quantexp resume",
        ),
        (
            {"state": "DEADLINE"},
            State.PREEMPTED,
            "the deadline of job 7_4 was reached at iteration 3 of 8; it will begin again at its first iteration",
        ),
        (
            {"state": "PREEMPTED"},
            State.PREEMPTED,
            "preempted by another job at iteration 3 of 8; it will begin again at its first iteration",
        ),
        (
            {"state": "NODE_FAIL", "nodes": "n2"},
            State.PREEMPTED,
            "node n2 was lost at iteration 3 of 8; it will begin again at its first iteration",
        ),
        (
            {"state": "BOOT_FAIL"},
            State.PREEMPTED,
            "a node did not boot at iteration 3 of 8; it will begin again at its first iteration",
        ),
        (
            {"state": "OUT_OF_MEMORY"},
            State.FAILED,
            "job 7_4 ran out of memory at iteration 3 of 8; give launcher.mem_gb more; it left no log",
        ),
        (
            {"state": "COMPLETED"},
            State.FAILED,
            "job 7_4 has completed, and the run did not; it left no log",
        ),
        (
            {"state": "FAILED", "status": "768", "reason": "NonZeroExitCode"},
            State.FAILED,
            "job 7_4 failed with exit code 3; it left no log",
        ),
        (
            {"state": "FAILED", "status": "9"},
            State.FAILED,
            "job 7_4 was ended by SIGKILL; it left no log",
        ),
        (
            {"state": "FAILED", "status": "35072"},
            State.FAILED,
            "job 7_4 failed with exit code 137 (SIGKILL); it left no log",
        ),
        (
            {"state": "LAUNCH_FAILED", "reason": "JobLaunchFailure"},
            State.FAILED,
            "job 7_4 failed with exit code 0 (JobLaunchFailure); it left no log",
        ),
    ],
)
def test_end_of_the_job_is_the_end_of_a_run_without_a_record(
    slurm: FakeSlurm, make_run: MakeRun, line: dict[str, Any], state: State, reason: str
) -> None:
    slurm.answer("squeue", queue_line("7_4", **line))
    entry = standing(submitted(make_run, iteration=3))
    assert (entry.state, entry.alive, entry.reason, entry.where) == (state, False, reason, "")
    assert entry.is_unrecorded_end


def test_failed_job_shows_the_end_of_the_runs_log_or_of_its_own(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    slurm.answer("squeue", queue_line("7_4", "FAILED", status="256"))
    run = submitted(make_run)
    own = RunsRoot(run.root.parent).submissions / SUBMISSION
    own.mkdir(parents=True)
    (own / "7_4_0_log.out").write_text("loading modules\n")
    (own / "7_4_0_log.err").write_text("")
    assert standing(run).reason.endswith("7_4_0_log.out:\nloading modules")
    (own / "7_4_0_log.err").write_text("python: command not found\n")
    assert standing(run).reason.endswith("7_4_0_log.err:\npython: command not found")
    run.rank_log(0).write_text("no memory\n")
    assert standing(run).reason.endswith("rank0.log:\nno memory")


@pytest.mark.parametrize("job", ["COMPLETING", "RUNNING", "CANCELLED"])
def test_recorded_end_of_a_run_counts_while_its_job_ends(
    slurm: FakeSlurm, make_run: MakeRun, job: str
) -> None:
    slurm.answer("squeue", queue_line("7_4", job))
    entry = standing(submitted(make_run, State.FAILED, reason="loss nan"))
    assert (entry.state, entry.alive, entry.reason) == (State.FAILED, False, "loss nan")
    assert slurm.calls("sacct") == []


def test_run_that_recorded_its_requeue_as_an_end_is_pending(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = submitted(make_run, State.CANCELLED, reason="interrupted")
    slurm.answer("squeue", queue_line("7_4", "COMPLETING", nodes="n1"))
    entry = standing(run)
    assert (entry.state, entry.alive, entry.reason) == (State.RUNNING, True, "")
    assert entry.where == "job 7_4 ending on n1"
    slurm.answer("squeue", queue_line("7_4", "PENDING", reason="BeginTime", restarts=1))
    entry = standing(run)
    assert (entry.state, entry.alive) == (State.PENDING, True)
    assert entry.reason == "requeued (interrupted)"


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        ("CANCELLED", State.CANCELLED, "cancelled in the scheduler"),
        ("TIMEOUT", State.PREEMPTED, "the time limit of 60 min was reached at iteration 3 of 8; "),
        ("NODE_FAIL", State.PREEMPTED, "a node was lost at iteration 3 of 8"),
        ("FAILED", State.CANCELLED, "interrupted"),
    ],
)
def test_run_that_recorded_only_a_signal_ended_as_its_job_did(
    slurm: FakeSlurm, make_run: MakeRun, job: str, state: State, reason: str
) -> None:
    slurm.answer("squeue", queue_line("7_4", job))
    run = submitted(make_run, State.CANCELLED, reason="interrupted", iteration=3)
    entry = standing(run)
    assert entry.state is state
    assert entry.reason.startswith(reason)
    assert entry.is_unrecorded_end is (job != "FAILED")


def test_run_that_recorded_only_a_signal_keeps_its_state_if_the_job_is_unknown(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make_run, State.CANCELLED, reason="interrupted")
    for path in (str(slurm.folder), "/nowhere"):
        monkeypatch.setenv("PATH", path)
        assert (standing(run).state, standing(run).note) == (State.CANCELLED, None)


def test_end_recorded_during_the_query_of_the_job_counts(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make_run)

    def ends(statuses: list[Status], **_: object) -> list[None]:
        write_status(run.status, Status(State.COMPLETED, submission=SUBMISSION))
        return [None] * len(statuses)

    monkeypatch.setattr("quantexp_launchers.slurm.launcher.jobs_of", ends)
    assert standing(run).state is State.COMPLETED


def test_preempted_run_that_was_cancelled_since_is_cancelled(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = submitted(make_run, State.PREEMPTED, reason="preempted by another job")
    assert standing(run).reason == "preempted by another job"
    slurm.answer("squeue", queue_line("7_4", "CANCELLED"))
    assert standing(run).state is State.CANCELLED


def test_run_whose_job_is_forgotten_was_preempted(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = submitted(make_run, iteration=3, started="2026-01-01T00:00:00+00:00")
    entry = standing(run)
    assert (entry.state, entry.is_unrecorded_end) == (State.PREEMPTED, True)
    assert entry.reason == (
        "the scheduler no longer knows job 7_4, and the run did not record its end, at iteration 3 of 8"
    )


def test_run_whose_job_is_forgotten_and_never_started_was_probably_cancelled(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = submitted(make_run, State.PENDING)
    entry = standing(run)
    assert (entry.state, entry.is_unrecorded_end) == (State.CANCELLED, False)
    assert entry.reason == (
        "the scheduler no longer knows job 7_4, which never started: cancelled there"
    )
    own = RunsRoot(run.root.parent).submissions / SUBMISSION
    own.mkdir(parents=True)
    (own / "7_4_0_log.out").write_text("begins\n")
    assert standing(run).state is State.PREEMPTED


def test_job_of_another_name_is_another_job(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", queue_line("7_4", "RUNNING", name="somebody-elses"))
    assert standing(submitted(make_run)).state is State.PREEMPTED


def test_job_of_a_run_whose_submitter_died_is_identified_by_its_name(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    slurm.answer("squeue", queue_line("7_4", "PENDING") + queue_line("7_5", "RUNNING"))
    entry = standing(submitted(make_run, State.PENDING, job_id=None))
    assert entry.where == "job 7_4 waiting"
    assert entry.job is not None
    assert entry.job.id == "7_4"


def test_run_that_is_being_submitted_is_pending(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue")
    run = submitted(make_run, State.PENDING, job_id=None)
    entry = standing(run)
    assert (entry.state, entry.alive, entry.where) == (State.PENDING, True, "being submitted")
    status = read_status(run.status)
    assert status is not None
    long_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    write_json(run.status, {**vars(status), "updated": long_ago})
    entry = standing(run)
    assert (entry.state, entry.alive) == (State.PREEMPTED, False)
    assert entry.reason == "its submission ended before SLURM had taken the job"


def test_without_slurm_the_folder_s_state_counts_with_a_note(
    no_slurm: None, make_run: MakeRun
) -> None:
    here, there = (
        make_run("a-1", State.COMPLETED, host=HERE),
        submitted(make_run, name="b-2"),
    )
    completed, running = standings([here, there])
    assert completed.note is None
    assert (running.state, running.alive, running.where) == (State.RUNNING, True, "job 7_4")
    assert running.note is not None
    assert running.note.startswith("its job was not queried: no SLURM here: squeue is not on")


def test_silent_accounting_leaves_no_run_alive_and_records_nothing(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    slurm.answer("squeue", queue_line("7_5", "RUNNING", nodes="n1"))
    slurm.answer("sacct", err="sacct: error: Connection refused\n", code=1)
    lost = submitted(make_run, name="a-1", iteration=3, started="2026-01-01T00:00:00+00:00")
    alive = submitted(make_run, name="b-2", job_id="7_5")
    ended, running = standings([lost, alive])
    assert (ended.state, ended.alive, ended.is_unrecorded_end) == (State.PREEMPTED, False, False)
    assert (ended.note or "").startswith("how its job ended is not known: sacct failed (exit code")
    assert (running.state, running.alive, running.note) == (State.RUNNING, True, None)


def test_job_belongs_to_the_folder_that_it_writes_and_not_to_a_copy(
    slurm: FakeSlurm, make_run: MakeRun, tmp_path: Path
) -> None:
    slurm.answer("squeue", queue_line("7_4", "RUNNING", nodes="n1"))
    run = submitted(make_run)
    status = read_status(run.status)
    assert status is not None
    status.folder = str(run.root)
    write_status(run.status, status)
    copies = [run.root.with_name("copy-1"), tmp_path / "elsewhere" / run.root.name]
    for copy in copies:
        shutil.copytree(run.root, copy)

    original, *others = standings([run, *map(RunDir, copies)])
    assert (original.state, original.job is not None) == (State.RUNNING, True)
    for other in others:
        assert (other.state, other.alive, other.job) == (State.PREEMPTED, False, None)
        assert other.reason == f"a copy of {run.root}, to which job 7_4 belongs"
    cancelled = launcher_of("slurm").cancel([each for each in others if each.alive])
    assert (cancelled, live_job(RunDir(copies[0]), status)) == ({}, None)

    shutil.rmtree(copies[0])
    run.root.rename(copies[0])
    moved = standing(RunDir(copies[0]))
    assert (moved.state, moved.where) == (State.RUNNING, "job 7_4 running on n1")


def test_sixty_runs_are_one_query(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", "".join(queue_line(f"7_{i}", "RUNNING") for i in range(60)))
    runs = [
        make_run(f"r-{i}", job_id=f"7_{i}", submission=SUBMISSION, task=i, iteration=1)
        for i in range(60)
    ]
    assert {entry.state for entry in standings(runs)} == {State.RUNNING}
    assert len(slurm.calls()) == 1


def test_live_job_is_described(slurm: FakeSlurm) -> None:
    slurm.answer(
        "squeue",
        queue_line("7_0", "PENDING", reason="Priority")
        + queue_line("7_1", "RUNNING", nodes="n1")
        + queue_line("7_2", "FAILED"),
    )
    statuses = [Status(submission=SUBMISSION, task=i, job_id=f"7_{i}") for i in range(4)]
    assert [live_job(NOWHERE, status) for status in [*statuses, Status()]] == [
        "job 7_0 is waiting (Priority)",
        "job 7_1 is running on n1",
        None,
        None,
        None,
    ]
    assert slurm.calls("sacct") == []


def test_live_job_is_queried_even_after_a_failure(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", queue_line("7_4", "COMPLETING", nodes="n1"))
    assert live_job(NOWHERE, Status(State.FAILED, job_id="7_4")) == "job 7_4 is ending on n1"


def test_job_that_cannot_be_queried_is_an_error(no_slurm: None) -> None:
    with pytest.raises(ClientError, match="no SLURM here"):
        live_job(NOWHERE, Status(State.PREEMPTED, job_id="7"))
    with pytest.raises(ClientError, match="no SLURM here"):
        live_job(NOWHERE, Status(State.PENDING, submission=SUBMISSION))
    assert live_job(NOWHERE, Status(State.FAILED, job_id="7")) is None
    assert live_job(NOWHERE, Status(State.RUNNING)) is None

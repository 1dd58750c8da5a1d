"""Reading the output of SLURM's clients, recorded from real clusters with and without accounting."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from quantexp_launchers.slurm import clients
from quantexp_launchers.slurm.clients import ClientError
from quantexp_launchers.slurm.scheduler import (
    IDS_PER_CALL,
    cancel,
    jobs,
    jobs_named,
    max_array_size,
)
from quantexp_launchers.slurm.states import JobState, SlurmJob

from .conftest import KINDS, RECORDED, FakeSlurm, queue_line

SINGLE = [str(number) for number in range(1, 20) if number not in (5, 6)]
#: The jobs submitted for the recording; 5_4 was cancelled before it started.
IDS = [*SINGLE, *(f"5_{i}" for i in range(8)), *(f"6_{i}" for i in range(4)), "99"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# squeue.


def test_controller_alone_answers_for_all_jobs_that_it_knows(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    states = {job_id: job.state for job_id, job in jobs([*IDS[:13], "5_0", "6_1"]).items()}
    assert states == {
        "1": JobState.COMPLETED,
        "2": JobState.FAILED,
        "3": JobState.FAILED,
        "4": JobState.TIMEOUT,
        "7": JobState.RUNNING,
        "8": JobState.FAILED,
        "9": JobState.PENDING,
        "10": JobState.PENDING,
        "11": JobState.RUNNING,
        "12": JobState.NODE_FAIL,
        "13": JobState.PENDING,
        "5_0": JobState.RUNNING,
        "6_1": JobState.CANCELLED,
    }


def test_many_ids_are_one_call(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    by_id = jobs([f"5_{i}" for i in (0, 1, 2, 3, 5, 6, 7)])
    assert len(by_id) == 7
    (call,) = slurm.calls()
    assert call[0] == "squeue"
    assert "--jobs=5" in call


def test_more_ids_than_fit_a_command_line_are_several_calls(slurm: FakeSlurm) -> None:
    slurm.answer("squeue")
    jobs(map(str, range(IDS_PER_CALL + 1)))
    assert len(slurm.calls("squeue")) == 2


def test_waiting_array_is_a_job_for_each_task_with_its_reason(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    assert jobs(["5_7"])["5_7"] == SlurmJob(
        "5_7", "quantexp-sweep", JobState.PENDING, "JobArrayTaskLimit"
    )
    assert jobs(["9"])["9"].reason == "DependencyNeverSatisfied"


def test_running_job_has_its_node_and_no_end(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    job = jobs(["7"])["7"]
    assert (job.nodes, job.ended, job.alive) == ("n1", None, True)
    assert job.time_limit_min == 365 * 24 * 60


def test_ended_job_has_exit_code_signal_time_and_limit(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    by_id = jobs(["2", "3", "4"])
    assert (by_id["2"].exit_code, by_id["2"].signal) == (3, 0)
    assert (by_id["3"].exit_code, by_id["3"].signal) == (0, 9)
    late = by_id["4"]
    assert (late.time_limit_min, late.reason, late.alive) == (1, "TimeLimit", False)
    second = 1795238998 if kind == "accounting" else 1795238999
    assert late.ended == datetime.fromtimestamp(second, UTC)


def test_requeued_job_is_pending_and_counts_its_restarts(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    by_id = jobs(["11", "13", "18"])  # requeued, its node lost, preempted
    assert [job.restarts for job in by_id.values()] == [1, 1, 1]
    assert by_id["11"].state is JobState.RUNNING
    for job_id, reason in (("13", "Resources"), ("18", "BeginTime")):
        assert (by_id[job_id].state, by_id[job_id].reason) == (JobState.PENDING, reason)


def test_name_may_hold_any_separator(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    assert jobs(["10"])["10"].name == "quantexp|odd name"


def test_tasks_cancelled_together_are_each_cancelled(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind, "squeue-together")
    by_id = jobs(["5_0", "5_1", "5_3", "5_7"])
    assert [by_id[f"5_{i}"].state for i in (0, 1, 3, 7)] == [
        JobState.RUNNING,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.CANCELLED,
    ]


def test_task_cancelled_before_it_started_is_unknown(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    assert set(IDS) - set(jobs(IDS)) >= {"5_4", "99"}


def test_unknown_number_is_absent(slurm: FakeSlurm) -> None:
    assert jobs(["99"]) == {}
    assert jobs([]) == {}


def test_heading_of_a_named_cluster_is_skipped(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", "CLUSTER: far\n" + queue_line("7", "RUNNING"))
    assert jobs(["7"])["7"].state is JobState.RUNNING


def test_exit_code_of_a_newer_version_is_read_too(slurm: FakeSlurm) -> None:
    slurm.answer("squeue", queue_line("7", "FAILED", status="3:0"))
    assert jobs(["7"])["7"].exit_code == 3


@pytest.mark.parametrize(
    ("limit", "minutes"), [("30:00", 30), ("2:30:00", 150), ("1-00:00:00", 1440), ("NOT_SET", None)]
)
def test_time_limit_is_minutes(slurm: FakeSlurm, limit: str, minutes: int | None) -> None:
    slurm.answer("squeue", queue_line("7", "RUNNING", limit=limit))
    assert jobs(["7"])["7"].time_limit_min == minutes


# sacct.


def test_accounting_answers_for_jobs_that_the_controller_forgot(slurm: FakeSlurm) -> None:
    slurm.forget("accounting")
    by_id = jobs(["1", "2", "3", "4", "12", "5_1", "6_0", "6_2"])
    assert {job_id: job.state for job_id, job in by_id.items()} == {
        "1": JobState.COMPLETED,
        "2": JobState.FAILED,
        "3": JobState.FAILED,
        "4": JobState.TIMEOUT,
        "12": JobState.NODE_FAIL,
        "5_1": JobState.FAILED,
        "6_0": JobState.CANCELLED,
        "6_2": JobState.CANCELLED,
    }
    assert (by_id["2"].exit_code, by_id["3"].signal) == (3, 9)
    assert by_id["4"].time_limit_min == 1
    assert by_id["4"].ended == datetime.fromtimestamp(1795238998, UTC)
    assert by_id["6_2"].nodes is None


def test_job_that_is_alive_only_in_accounting_is_lost(slurm: FakeSlurm) -> None:
    slurm.forget("accounting")
    assert jobs(["5_0", "5_5", "7", "10", "11"]) == {}


def test_accounting_is_queried_for_past_jobs_alone(slurm: FakeSlurm) -> None:
    slurm.forget("accounting")
    assert jobs(["1"], past=()) == {}
    assert jobs_named("quantexp-done", past=False) == {}
    assert slurm.calls("sacct") == []
    assert list(jobs(["1", "2"], past=["2"])) == ["2"]


def test_newest_of_several_jobs_with_a_number_counts(slurm: FakeSlurm) -> None:
    newer = "1|FAILED|1:0|1795239999|1795240000|60|n1|new\n"
    slurm.answer("sacct", newer + (RECORDED / "accounting" / "sacct.out").read_text())
    assert jobs(["1"])["1"].name == "new"


def test_stride_and_single_tasks_of_a_range_are_read(slurm: FakeSlurm) -> None:
    slurm.answer("sacct", "9_[1,4-8:2,11-12%3]|CANCELLED by 0|0:0|1|2|60|None assigned|x\n")
    assert sorted(jobs([f"9_{i}" for i in range(14)])) == sorted(
        f"9_{i}" for i in (1, 4, 6, 8, 11, 12)
    )


def test_accounting_that_is_down_is_an_error(slurm: FakeSlurm) -> None:
    slurm.answer(
        "sacct", err="sacct: error: Problem talking to the database: Connection refused\n", code=1
    )
    with pytest.raises(
        ClientError,
        match=r"sacct failed \(exit code 1\): sacct: error: Problem talking to the database: "
        r"Connection refused; see `scontrol ping`, and try again",
    ):
        jobs(["99"])


def test_cluster_without_sacct_has_no_accounting(slurm: FakeSlurm) -> None:
    (slurm.folder / "sacct").unlink()
    assert jobs(["99"]) == {}


# By name.


def test_jobs_of_a_name_are_indexed_by_their_task(slurm: FakeSlurm, kind: str) -> None:
    slurm.replay(kind)
    by_task = jobs_named("quantexp-sweep")
    assert sorted(by_task, key=str) == [0, 1, 2, 3, 5, 6, 7]
    assert by_task[1].state is JobState.FAILED
    assert by_task[3].state is JobState.PENDING
    assert list(jobs_named("quantexp-base")) == [None]
    assert jobs_named("quantexp-none") == {}


def test_ended_jobs_of_a_name_are_in_accounting(slurm: FakeSlurm) -> None:
    slurm.forget("accounting")
    slurm.answer("squeue")
    since = datetime(2026, 11, 21, tzinfo=UTC)
    by_task = jobs_named("quantexp-gone", since)
    assert {task: job.state for task, job in by_task.items()} == dict.fromkeys(
        range(4), JobState.CANCELLED
    )
    (call,) = slurm.calls("sacct")
    start = next(word for word in call if word.startswith("--starttime="))
    assert datetime.fromisoformat(start.partition("=")[2]).astimezone(UTC) == since


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        ("MaxArraySize            = 5\n", 5),
        ("MaxArraySize = 0\n", 1),
        ("Other = 7\n", 1001),
        ("", 1001),
    ],
)
def test_size_of_an_array_is_the_controllers(slurm: FakeSlurm, answer: str, size: int) -> None:
    slurm.answer(
        "scontrol", f"Configuration data\nMaxArraySizes = 9\n{answer}", code=int(not answer)
    )
    assert max_array_size() == size


# The clients.


def test_machine_without_slurm_is_reported(no_slurm: None) -> None:
    with pytest.raises(ClientError, match=r"no SLURM here: squeue is not on PATH; go to a machine"):
        jobs(["1"])


def test_wait_for_a_silent_controller_has_a_limit(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CLIENT_S", 0.2)
    slurm.answer("squeue", delay_s=5)
    with pytest.raises(
        ClientError, match=r"the SLURM controller does not answer: squeue was given up after 0 s"
    ):
        jobs(["1"])


def test_client_that_fails_is_quoted(slurm: FakeSlurm) -> None:
    error = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm.answer("squeue", err=f"squeue: error: retrying\n{error}\n", code=1)
    with pytest.raises(ClientError) as caught:
        jobs(["1"])
    assert str(caught.value) == (
        f"squeue failed (exit code 1): {error}; see `scontrol ping`, and try again"
    )
    slurm.answer("squeue", code=1)
    with pytest.raises(ClientError, match="squeue failed \\(exit code 1\\): no message"):
        jobs(["1"])


def test_defaults_in_the_users_environment_do_not_change_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SACCT_FORMAT", "JobID")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    variables = clients.run_client(["env"]).splitlines()
    assert "SLURM_TIME_FORMAT=%s" in variables
    assert not [line for line in variables if line.startswith(("SQUEUE_", "SACCT_"))]


def test_cancelling_names_every_job_in_one_call(slurm: FakeSlurm) -> None:
    cancel(["4_1", "4_2", "7"])
    assert slurm.calls() == [["scancel", "4_1", "4_2", "7"]]
    cancel([])
    assert len(slurm.calls()) == 1

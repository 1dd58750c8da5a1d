"""How the scheduler ended a job, from SLURM 22.05's records of ending jobs (recorded, and shortened)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quantexp_launchers.slurm.ends import (
    ENDS,
    cause_of,
    cause_printed,
    end_in_job,
    ending_job,
    is_requeued,
    read_within,
    record_of,
    run_end,
)
from quantexp_launchers.slurm.states import JobState, SlurmJob

from quantexp.runs.status import State, Status

#: Recorded at the last line of a job's script.
RECORD = (
    "JobId=22 JobName=quantexp-1 UserId=root(0) GroupId=root(0) Account=research QOS=normal JobState={state} "
    "Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 ExitCode=0:0 RunTime=00:00:07 "
    "TimeLimit=01:00:00 Deadline=N/A PreemptEligibleTime=2026-11-21T05:45:43 PreemptTime={preempted} "
    "Partition=lo NodeList=n1 BatchHost=n1 Command=/w/runs/submissions/q/.submission_file_1.sh WorkDir=/w Power= \n"
)


def job_record(
    state: str, reason: str = "None", restarts: int = 0, preempted: str = "None"
) -> dict[str, str]:
    text = RECORD.format(state=state, reason=reason, restarts=restarts, preempted=preempted)
    return record_of(text, "22")


AT = "2026-11-21T05:45:54"


@pytest.mark.parametrize(
    ("job", "ended_as", "state", "cause"),
    [
        (
            job_record("COMPLETING"),
            JobState.CANCELLED,
            State.CANCELLED,
            "cancelled in the scheduler",
        ),
        (
            job_record("CANCELLED"),
            JobState.CANCELLED,
            State.CANCELLED,
            "cancelled in the scheduler",
        ),
        (job_record("COMPLETING", restarts=1), JobState.REQUEUED, State.PREEMPTED, "requeued"),
        (
            job_record("PENDING", "BeginTime", restarts=1),
            JobState.REQUEUED,
            State.PREEMPTED,
            "requeued",
        ),
        (
            job_record("RUNNING", preempted=AT),
            *(JobState.PREEMPTED, State.PREEMPTED, "preempted by another job"),
        ),
        (
            job_record("COMPLETING", "TimeLimit"),
            *(JobState.TIMEOUT, State.PREEMPTED, "the time limit of 60 min was reached"),
        ),
        (
            job_record("TIMEOUT", "TimeLimit"),
            *(JobState.TIMEOUT, State.PREEMPTED, "the time limit of 60 min was reached"),
        ),
        (
            job_record("NODE_FAIL", "NodeDown"),
            *(JobState.NODE_FAIL, State.PREEMPTED, "node n1 was lost"),
        ),
        (
            job_record("DEADLINE"),
            *(JobState.DEADLINE, State.PREEMPTED, "the deadline of job 22 was reached"),
        ),
        (
            job_record("COMPLETING", "QOSMaxWallDurationPerJobLimit"),
            *(JobState.UNKNOWN, State.PREEMPTED),
            "ended by the scheduler (QOSMaxWallDurationPerJobLimit)",
        ),
    ],
)
def test_end_of_a_job_has_its_state_and_cause(
    job: dict[str, str], ended_as: JobState, state: State, cause: str
) -> None:
    ended = ending_job(job, 0)
    assert ended is not None
    assert (ended.state, ENDS[ended.state].state, cause_of(ended)) == (ended_as, state, cause)


def test_every_state_that_ends_a_job_is_in_the_table() -> None:
    assert {state for state in JobState if not state.alive} <= set(ENDS)


@pytest.mark.parametrize(
    "job", [job_record("COMPLETING", "TimeLimit"), job_record("NODE_FAIL", "NodeDown")]
)
def test_job_s_own_end_and_the_ledger_agree(job: dict[str, str]) -> None:
    ended = ending_job(job, 0)
    assert ended is not None
    status = Status(State.RUNNING, iteration=4, iterations=9)
    assert end_in_job(ended, status, 3, None) == run_end(ended, status)


@pytest.mark.parametrize("job", [{}, job_record("RUNNING"), job_record("RUNNING", restarts=0)])
def test_job_that_ends_by_itself_was_not_ended_by_the_scheduler(job: dict[str, str]) -> None:
    assert ending_job(job, 0) is None


CANCELLED = (
    "slurmstepd-n2: error: *** {what} 26 ON n2 CANCELLED AT 2026-11-21T{at} DUE TO {why} ***\n"
)


def write_output(folder: Path, *ends: tuple[str, str]) -> Path:
    """A job's own output over several starts, each ended at a time for a reason."""
    lines = ["srun: error: n2: task 0: Terminated\n"]
    for at, why in ends:
        lines += [CANCELLED.format(what=what, at=at, why=why) for what in ("JOB", "STEP")]
    (folder / "26_0_log.err").write_text("".join(lines))
    return folder / "26_0_log.err"


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("PREEMPTION", "preempted by another job"),
        ("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node n2 was lost"),
        ("JOB REQUEUE", "requeued"),
        ("TIME LIMIT", None),
    ],
)
@pytest.mark.usefixtures("_utc")
def test_job_s_own_output_has_the_cause_of_its_requeue(
    tmp_path: Path, why: str, cause: str | None
) -> None:
    output = write_output(tmp_path, ("06:20:25", "PREEMPTION"), ("06:30:39", why))
    assert cause_printed(output, "2026-11-21T06:30:39.500+00:00") == cause
    assert cause_printed(output, "2026-11-21T06:30:40.000+00:00") is None, "of an earlier start"


def test_output_that_is_silent_or_missing_has_no_cause(tmp_path: Path) -> None:
    assert cause_printed(write_output(tmp_path), "2026-11-21T06:30:39.500+00:00") is None
    assert cause_printed(write_output(tmp_path, ("06:20:25", "PREEMPTION")), None) is None
    assert cause_printed(tmp_path / "gone", "2026-11-21T06:30:39.500+00:00") is None


def test_printed_cause_is_reported_only_for_a_requeued_job() -> None:
    cause_in_log = "node n2 was lost"
    status = Status(State.RUNNING, iteration=4, iterations=9)
    for job, cause in (
        (job_record("PENDING", "BeginTime", restarts=1), cause_in_log),
        (job_record("COMPLETING"), "cancelled in the scheduler"),
    ):
        ended = ending_job(job, 0)
        assert ended is not None
        assert end_in_job(ended, status, 3, cause_in_log)[1].startswith(
            f"{cause} at iteration 4 of 9"
        )


def test_earlier_restart_does_not_count_again() -> None:
    assert ending_job(job_record("RUNNING", restarts=2), 2) is None
    assert ending_job(job_record("COMPLETING", restarts=3), 2) is not None


def words(job: dict[str, str], restarts: int = 0, max_requeue: int = 3) -> tuple[State, str]:
    ended = ending_job(job, restarts)
    assert ended is not None
    before = [{"reason": f"cause {number}"} for number in range(restarts)]
    status = Status(State.RUNNING, iteration=4, iterations=9, restarts=before)
    return end_in_job(ended, status, max_requeue, None)


def test_requeued_run_reports_where_it_begins() -> None:
    assert words(job_record("PENDING", restarts=1)) == (
        State.PREEMPTED,
        "requeued at iteration 4 of 9; it will begin again at its first iteration",
    )


def test_time_limit_comes_with_a_remedy() -> None:
    state, reason = words(job_record("COMPLETING", "TimeLimit"))
    assert state is State.PREEMPTED
    assert reason.startswith(
        "the time limit of 60 min was reached at iteration 4 of 9; it will begin again"
    )
    assert reason.endswith(", so give launcher.time_min more to quantexp resume")


def test_time_limit_of_a_run_with_a_checkpoint_is_no_end() -> None:
    job = ending_job(job_record("COMPLETING", "TimeLimit"), 0)
    assert job is not None
    status = Status(iteration=4, iterations=9, state=State.RUNNING)
    assert end_in_job(job, status, 3, None, first=4) == (
        State.PREEMPTED,
        "the time limit of 60 min was reached at iteration 4 of 9; it will go on at iteration 4",
    )
    assert is_requeued(job, first=4)
    assert not is_requeued(job, first=1), "it would only come to the same end again"
    status.restarts = [{"reason": f"cause {i}", "requeued": True} for i in range(3)]
    assert end_in_job(job, status, 3, None, first=4)[0] is State.FAILED
    status.restarts.append({"reason": "interrupted", "requeued": False})
    assert end_in_job(job, status, 3, None, first=4)[0] is State.PREEMPTED, "the user's start"


def test_cancelled_run_does_not_come_back() -> None:
    assert words(job_record("COMPLETING")) == (
        State.CANCELLED,
        "cancelled in the scheduler at iteration 4 of 9",
    )


def test_waiting_reason_of_a_cancelled_job_is_not_its_cause() -> None:
    waited = SlurmJob("7", "q", JobState.CANCELLED, reason="Priority")
    assert cause_of(waited) == "cancelled in the scheduler"
    never = SlurmJob("7", "q", JobState.CANCELLED, reason="DependencyNeverSatisfied")
    assert cause_of(never) == "cancelled in the scheduler (DependencyNeverSatisfied)"


def test_one_start_too_many_fails_with_every_reason() -> None:
    job = job_record("RUNNING", restarts=2, preempted=AT)
    assert words(job, restarts=2, max_requeue=2) == (
        State.FAILED,
        "requeued 3 times, and launcher.max_requeue=2 allows no more: cause 0; cause 1; preempted by "
        "another job at iteration 4 of 9",
    )
    assert words(job, restarts=2, max_requeue=3)[0] is State.PREEMPTED


def test_run_that_may_not_be_requeued_at_all_gives_the_reason() -> None:
    assert words(job_record("RUNNING", preempted=AT), max_requeue=0) == (
        State.PREEMPTED,
        "preempted by another job at iteration 4 of 9; launcher.max_requeue=0 allows no requeue",
    )


# Reading the record.


def test_output_is_read_to_its_end() -> None:
    read, write = os.pipe()
    os.write(write, "JobId=1 Comment=é\n".encode())
    os.close(write)
    assert read_within(read, 10) == "JobId=1 Comment=é\n"
    os.close(read)


def test_reading_stops_after_its_time_limit() -> None:
    read, write = os.pipe()
    os.write(write, b"JobId=1")
    assert read_within(read, 0.2) == "JobId=1"
    os.close(read)
    os.close(write)


def test_record_of_an_array_s_task_is_chosen_among_all() -> None:
    lines = (
        "JobId=8 ArrayJobId=7 ArrayTaskId=0 JobState=FAILED Restarts=3\n"
        "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING Restarts=0\n"
        "JobId=9 ArrayJobId=7 ArrayTaskId=2 JobState=PENDING Restarts=1\n"
    )
    assert record_of(lines, "7")["JobState"] == "RUNNING"
    assert record_of(lines, "9")["Restarts"] == "1"
    assert record_of(lines, "1") == record_of("", "1") == {}


def test_values_with_blanks_are_whole_and_a_path_sets_no_field() -> None:
    line = (
        "JobId=7 JobName=a b JobState=RUNNING Reason=None "
        "Command=/w/x JobState=COMPLETING Reason=TimeLimit Restarts=9 y/run.sh WorkDir=/w\n"
    )
    record = record_of(line, "7")
    assert record["JobName"] == "a b"
    assert (record["JobState"], record["Reason"]) == ("RUNNING", "None")
    assert ending_job(record | {"Restarts": "0"}, 0) is None

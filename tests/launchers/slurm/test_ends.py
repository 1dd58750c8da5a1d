"""What the scheduler did to a job, from what SLURM 22.05 said of jobs that were ending (recorded, and shortened)."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantexp_launchers.slurm.ends import (
    ENDS,
    cause_of,
    cause_printed,
    end_in_job,
    ending_job,
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


def said(
    state: str, reason: str = "None", restarts: int = 0, preempted: str = "None"
) -> dict[str, str]:
    text = RECORD.format(state=state, reason=reason, restarts=restarts, preempted=preempted)
    return record_of(text, "22")


AT = "2026-11-21T05:45:54"


@pytest.mark.parametrize(
    ("job", "ended_as", "state", "cause"),
    [
        (said("COMPLETING"), JobState.CANCELLED, State.CANCELLED, "cancelled in the scheduler"),
        (said("CANCELLED"), JobState.CANCELLED, State.CANCELLED, "cancelled in the scheduler"),
        (said("COMPLETING", restarts=1), JobState.REQUEUED, State.PREEMPTED, "requeued"),
        (said("PENDING", "BeginTime", restarts=1), JobState.REQUEUED, State.PREEMPTED, "requeued"),
        (
            said("RUNNING", preempted=AT),
            *(JobState.PREEMPTED, State.PREEMPTED, "preempted by another job"),
        ),
        (
            said("COMPLETING", "TimeLimit"),
            *(JobState.TIMEOUT, State.PREEMPTED, "the time limit of 60 min was reached"),
        ),
        (
            said("TIMEOUT", "TimeLimit"),
            *(JobState.TIMEOUT, State.PREEMPTED, "the time limit of 60 min was reached"),
        ),
        (
            said("NODE_FAIL", "NodeDown"),
            *(JobState.NODE_FAIL, State.PREEMPTED, "node n1 was lost"),
        ),
        (
            said("DEADLINE"),
            *(JobState.DEADLINE, State.PREEMPTED, "the deadline of job 22 was reached"),
        ),
        (
            said("COMPLETING", "QOSMaxWallDurationPerJobLimit"),
            *(JobState.UNKNOWN, State.PREEMPTED),
            "ended by the scheduler (QOSMaxWallDurationPerJobLimit)",
        ),
    ],
)
def test_what_was_done_to_a_job(
    job: dict[str, str], ended_as: JobState, state: State, cause: str
) -> None:
    found = ending_job(job, 0)
    assert found is not None
    assert (found.state, ENDS[found.state].state, cause_of(found)) == (ended_as, state, cause)


def test_every_state_that_ends_a_job_is_in_the_table() -> None:
    assert {state for state in JobState if not state.alive} <= set(ENDS)


@pytest.mark.parametrize("job", [said("COMPLETING", "TimeLimit"), said("NODE_FAIL", "NodeDown")])
def test_job_s_own_end_and_the_ledger_say_the_same(job: dict[str, str]) -> None:
    found = ending_job(job, 0)
    assert found is not None
    status = Status(State.RUNNING, iteration=4, iterations=9)
    assert end_in_job(found, status, 3, None) == run_end(found, status)


@pytest.mark.parametrize("job", [{}, said("RUNNING"), said("RUNNING", restarts=0)])
def test_job_that_ends_by_itself_was_not_taken_away(job: dict[str, str]) -> None:
    assert ending_job(job, 0) is None


CANCELLED = (
    "slurmstepd-n2: error: *** {what} 26 ON n2 CANCELLED AT 2026-11-21T{at} DUE TO {why} ***\n"
)


def printed(folder: Path, *ends: tuple[str, str]) -> Path:
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
def test_job_s_own_output_says_why_it_was_put_back(
    tmp_path: Path, why: str, cause: str | None
) -> None:
    output = printed(tmp_path, ("06:20:25", "PREEMPTION"), ("06:30:39", why))
    assert cause_printed(output, "2026-11-21T06:30:39.500+00:00") == cause
    assert cause_printed(output, "2026-11-21T06:30:40.000+00:00") is None, "of an earlier start"


def test_output_that_says_nothing_or_is_gone_has_no_cause(tmp_path: Path) -> None:
    assert cause_printed(printed(tmp_path), "2026-11-21T06:30:39.500+00:00") is None
    assert cause_printed(printed(tmp_path, ("06:20:25", "PREEMPTION")), None) is None
    assert cause_printed(tmp_path / "gone", "2026-11-21T06:30:39.500+00:00") is None


def test_printed_cause_is_told_of_a_job_that_was_put_back_alone() -> None:
    printed = "node n2 was lost"
    status = Status(State.RUNNING, iteration=4, iterations=9)
    for job, cause in (
        (said("PENDING", "BeginTime", restarts=1), printed),
        (said("COMPLETING"), "cancelled in the scheduler"),
    ):
        found = ending_job(job, 0)
        assert found is not None
        assert end_in_job(found, status, 3, printed)[1].startswith(f"{cause} at iteration 4 of 9")


def test_restart_of_before_is_not_another_one() -> None:
    assert ending_job(said("RUNNING", restarts=2), 2) is None
    assert ending_job(said("COMPLETING", restarts=3), 2) is not None


def words(job: dict[str, str], restarts: int = 0, max_requeue: int = 3) -> tuple[State, str]:
    taken = ending_job(job, restarts)
    assert taken is not None
    before = [{"reason": f"cause {number}"} for number in range(restarts)]
    status = Status(State.RUNNING, iteration=4, iterations=9, restarts=before)
    return end_in_job(taken, status, max_requeue, None)


def test_run_that_comes_back_says_where_it_begins() -> None:
    assert words(said("PENDING", restarts=1)) == (
        State.PREEMPTED,
        "requeued at iteration 4 of 9; it will begin again at its first iteration",
    )


def test_time_limit_says_what_to_do() -> None:
    state, reason = words(said("COMPLETING", "TimeLimit"))
    assert state is State.PREEMPTED
    assert reason.startswith(
        "the time limit of 60 min was reached at iteration 4 of 9; it will begin again"
    )
    assert reason.endswith(", so give launcher.time_min more to quantexp resume")


def test_cancelled_run_does_not_come_back() -> None:
    assert words(said("COMPLETING")) == (
        State.CANCELLED,
        "cancelled in the scheduler at iteration 4 of 9",
    )


def test_waiting_reason_of_a_cancelled_job_is_not_its_cause() -> None:
    waited = SlurmJob("7", "q", JobState.CANCELLED, reason="Priority")
    assert cause_of(waited) == "cancelled in the scheduler"
    never = SlurmJob("7", "q", JobState.CANCELLED, reason="DependencyNeverSatisfied")
    assert cause_of(never) == "cancelled in the scheduler (DependencyNeverSatisfied)"


def test_start_too_many_fails_with_every_reason() -> None:
    job = said("RUNNING", restarts=2, preempted=AT)
    assert words(job, restarts=2, max_requeue=2) == (
        State.FAILED,
        "requeued 3 times, and launcher.max_requeue=2 allows no more: cause 0; cause 1; preempted by "
        "another job at iteration 4 of 9",
    )
    assert words(job, restarts=2, max_requeue=3)[0] is State.PREEMPTED


def test_run_that_may_not_come_back_at_all_says_so() -> None:
    assert words(said("RUNNING", preempted=AT), max_requeue=0) == (
        State.PREEMPTED,
        "preempted by another job at iteration 4 of 9; launcher.max_requeue=0 allows no requeue",
    )


# Reading the record.


def test_task_of_an_array_is_found_among_all() -> None:
    lines = (
        "JobId=8 ArrayJobId=7 ArrayTaskId=0 JobState=FAILED Restarts=3\n"
        "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING Restarts=0\n"
        "JobId=9 ArrayJobId=7 ArrayTaskId=2 JobState=PENDING Restarts=1\n"
    )
    assert record_of(lines, "7")["JobState"] == "RUNNING"
    assert record_of(lines, "9")["Restarts"] == "1"
    assert record_of(lines, "1") == record_of("", "1") == {}


def test_values_with_blanks_are_whole_and_a_path_can_say_nothing() -> None:
    line = (
        "JobId=7 JobName=a b JobState=RUNNING Reason=None "
        "Command=/w/x JobState=COMPLETING Reason=TimeLimit Restarts=9 y/run.sh WorkDir=/w\n"
    )
    found = record_of(line, "7")
    assert found["JobName"] == "a b"
    assert (found["JobState"], found["Reason"]) == ("RUNNING", "None")
    assert ending_job(found | {"Restarts": "0"}, 0) is None

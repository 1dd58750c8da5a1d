"""SLURM's words for a job."""

from __future__ import annotations

import pytest
from quantexp_launchers.slurm.states import (
    JobState,
    SlurmJob,
    base_id,
    describe,
    job_state,
    task_index,
)


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("PENDING", JobState.PENDING),
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 0", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("NODE_FAIL", JobState.NODE_FAIL),
        ("CONFIGURING", JobState.PENDING),
        ("STAGE_OUT", JobState.COMPLETING),
        ("REQUEUE_HOLD", JobState.REQUEUED),
        ("SPECIAL_EXIT", JobState.REQUEUED),
        ("LAUNCH_FAILED", JobState.FAILED),
        ("", JobState.UNKNOWN),
    ],
)
def test_state_is_read_by_its_first_word(words: str, state: JobState) -> None:
    assert job_state(words) is state


def test_unknown_state_of_a_newer_slurm_counts_as_alive() -> None:
    assert job_state("EXPEDITING") is JobState.UNKNOWN
    assert JobState.UNKNOWN.alive


def test_job_that_may_still_run_or_write_is_alive() -> None:
    assert [state for state in JobState if state.alive] == [
        JobState.PENDING,
        JobState.RUNNING,
        JobState.COMPLETING,
        JobState.REQUEUED,
        JobState.SUSPENDED,
        JobState.UNKNOWN,
    ]


@pytest.mark.parametrize(
    ("state", "reason", "nodes", "words"),
    [
        (JobState.PENDING, "Resources", None, "waiting (Resources)"),
        (JobState.REQUEUED, None, None, "waiting"),
        (JobState.RUNNING, None, "n[1-2]", "running on n[1-2]"),
        (JobState.COMPLETING, None, "n1", "ending on n1"),
        (JobState.SUSPENDED, None, None, "suspended"),
    ],
)
def test_living_job_is_described(
    state: JobState, reason: str | None, nodes: str | None, words: str
) -> None:
    assert describe(SlurmJob("7", "x", state, reason, nodes=nodes)) == words


def test_number_of_a_task_has_two_parts() -> None:
    assert (base_id("123_4"), task_index("123_4")) == ("123", 4)
    assert (base_id("123"), task_index("123")) == ("123", None)

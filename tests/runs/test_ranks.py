"""The rank of a process, and which rank caused the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import (
    ENDED_SILENTLY,
    Rank,
    RankRecord,
    end_record,
    log_end,
    outcome_of_ranks,
    own_rank,
    read_record,
    write_record,
)
from quantexp.runs.status import State


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def leaves(run: RunDir, rank: int, record: RankRecord | None, log: str = "") -> None:
    run.logs.mkdir(exist_ok=True)
    run.rank_log(rank).write_text(log)
    if record is not None:
        write_record(run, rank, record)


def failed(reason: str, *, lost_peer: bool = False, at: str = "1") -> RankRecord:
    return RankRecord(1, State.FAILED, reason, lost_peer, at)


SILENT = RankRecord(1)
CANCELLED = RankRecord(1, State.CANCELLED, "interrupted", False, "1")


def test_process_without_torchrun_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert own_rank(1) == Rank()
    assert Rank().leads
    assert Rank().alone


def test_rank_is_that_of_torchrun_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    rank = own_rank(4)
    assert rank == Rank(3, 4, 1)
    assert not rank.leads
    assert not rank.alone


def test_another_number_of_processes_than_configured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        RunError,
        match=r"this run is for launcher\.num_processes=2, and was started with WORLD_SIZE=1; start it with quantexp",
    ):
        own_rank(2)


def test_record_comes_back_as_written(run: RunDir) -> None:
    assert read_record(run, 0) is None
    record = end_record(State.FAILED, "no more disk")
    write_record(run, 0, record)
    assert read_record(run, 0) == record


def test_first_rank_that_failed_by_itself_is_the_cause(run: RunDir) -> None:
    leaves(run, 0, failed("gloo: connection closed", lost_peer=True, at="1"))
    leaves(run, 1, failed("later", at="3"))
    leaves(run, 2, failed("no more disk", at="2"), log="its last line")
    state, reason = outcome_of_ranks(run, 3)
    assert state is State.FAILED
    assert reason.splitlines() == [
        f"rank 2: no more disk; see {run.rank_log(2)}",
        f"rank 1: later; see {run.rank_log(1)}",
        "rank 0 then: gloo: connection closed",
    ]


def test_same_cause_in_many_ranks_is_one_line(run: RunDir) -> None:
    for rank in range(5):
        log = run.rank_log(rank)
        leaves(
            run, rank, failed(f"ValueError: at address {rank}; traceback in {log}", at=str(rank))
        )
    leaves(run, 5, failed("gloo: connection closed by 127.0.0.1:1", lost_peer=True, at="8"))
    leaves(run, 6, failed("gloo: connection closed by 127.0.0.1:2", lost_peer=True, at="9"))
    assert outcome_of_ranks(run, 7)[1].splitlines() == [
        f"ranks 0, 1, 2, 3, 4: ValueError: at address 0; traceback in {run.rank_log(0)}",
        "ranks 5, 6 then: gloo: connection closed by 127.0.0.1:1",
    ]


def test_reason_of_all_ranks_is_reported_once(run: RunDir) -> None:
    leaves(run, 0, failed("not what was declared"))
    leaves(run, 1, failed("not what was declared"))
    assert outcome_of_ranks(run, 2) == (State.FAILED, "not what was declared")


def test_silent_rank_is_the_cause_if_the_others_lost_a_peer(run: RunDir) -> None:
    leaves(run, 0, failed("timed out", lost_peer=True))
    leaves(run, 1, SILENT, log="stuck here")
    state, reason = outcome_of_ranks(run, 2)
    assert state is State.FAILED
    assert reason.splitlines() == [
        f"rank 1 did not end by itself (killed, out of memory, or hanging); see {run.rank_log(1)}, which ends: stuck "
        "here",
        "rank 0 then: timed out",
    ]


def test_rank_that_ended_without_a_record_is_the_cause_of_signals_after_it(run: RunDir) -> None:
    leaves(run, 0, failed(ENDED_SILENTLY, at="1"))
    leaves(run, 1, RankRecord(1, State.CANCELLED, "ended by SIGTERM", False, "2"))
    state, reason = outcome_of_ranks(run, 2)
    assert state is State.FAILED
    assert reason.startswith(f"rank 0 {ENDED_SILENTLY}; ")


def test_rank_that_was_signalled_first_is_named(run: RunDir) -> None:
    run.logs.mkdir()
    run.torchrun_log.write_text("Root Cause (first observed failure):\n")
    leaves(run, 0, RankRecord(1, State.CANCELLED, "ended by SIGTERM", False, "2"))
    leaves(run, 1, RankRecord(1, State.CANCELLED, "ended by SIGTERM", False, "1"))
    leaves(run, 2, failed(ENDED_SILENTLY, at="3"))
    leaves(run, 3, failed("connection closed", lost_peer=True, at="2"))
    assert outcome_of_ranks(run, 4) == (State.CANCELLED, "rank 1 was ended by SIGTERM")
    run.torchrun_log.write_text("SignalException: Process 1 got signal: 15\n")
    assert outcome_of_ranks(run, 4) == (State.CANCELLED, "interrupted")


def test_rank_that_never_started_is_reported_with_torchrun_s_output(run: RunDir) -> None:
    leaves(run, 0, CANCELLED)
    run.torchrun_log.write_text("ImportError")
    state, reason = outcome_of_ranks(run, 2)
    assert state is State.FAILED
    assert reason == f"rank 1 did not start; see {run.torchrun_log}, which ends: ImportError"


def test_first_of_ranks_that_lost_each_other_is_named(run: RunDir) -> None:
    leaves(run, 0, failed("second", lost_peer=True, at="2"))
    leaves(run, 1, failed("first", lost_peer=True, at="1"))
    assert outcome_of_ranks(run, 2)[1] == f"rank 1: first; see {run.rank_log(1)}"


def test_run_whose_ranks_are_all_cancelled_is_cancelled(run: RunDir) -> None:
    leaves(run, 0, CANCELLED)
    leaves(run, 1, CANCELLED)
    assert outcome_of_ranks(run, 2) == (State.CANCELLED, "interrupted")


def test_failure_of_torchrun_after_all_ranks_completed_changes_nothing(run: RunDir) -> None:
    for rank in (0, 1):
        leaves(run, rank, RankRecord(1, State.COMPLETED, "stopped after capture", False, "1"))
    assert outcome_of_ranks(run, 2) == (State.COMPLETED, "stopped after capture")


def test_missing_log_is_mentioned(tmp_path: Path) -> None:
    assert log_end(tmp_path / "none") == "it left no log"

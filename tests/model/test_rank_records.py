"""Rank 0 waits for the records of all ranks, and for nothing that will not come."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from quantexp.errors import RunError, UnreadableError
from quantexp.model.rank_records import (
    RECORDS,
    RankRecord,
    await_records,
    num_others,
    write_record,
)

RECORD = RankRecord(
    hashes={"rank00001.safetensors": {"bytes": 3, "xxh3_128": "ab", "tensors": {"main/w": "cd"}}},
    amax_histories={"layer 0 fc1 linear.fprop.x": {"window": 4, "amaxes": [0.1, 1e-38]}},
)


def test_records_come_back_by_rank_when_the_last_one_is_there(tmp_path: Path) -> None:
    write_record(tmp_path, 1, RECORD)
    (tmp_path / RECORDS / ".rank00000.json.17").write_text("{")  # being written

    def write_later() -> None:
        time.sleep(0.1)
        write_record(tmp_path, 0, RankRecord())

    thread = threading.Thread(target=write_later)
    thread.start()
    assert await_records(tmp_path, 2) == [RankRecord(), RECORD]
    thread.join()


def test_an_error_is_raised_without_waiting_for_other_ranks(tmp_path: Path) -> None:
    write_record(tmp_path, 2, RankRecord("x cannot be written (No space left on device)"))
    with pytest.raises(RunError, match=r"^x cannot be written \(No space left on device\)$"):
        await_records(tmp_path, 3)


@pytest.mark.parametrize(("number", "shown"), [(3, "1, 2$"), (9, r"1, 2, 3, 4, 5, \.\.\.$")])
def test_missing_ranks_are_named_when_the_wait_is_given_up(
    tmp_path: Path, number: int, shown: str
) -> None:
    write_record(tmp_path, 0, RankRecord())
    with pytest.raises(RunError, match=rf"is not whole: nothing came from rank {shown}"):
        await_records(tmp_path, number, lambda: True)


def test_damaged_record_is_named(tmp_path: Path) -> None:
    write_record(tmp_path, 0, RankRecord())
    (tmp_path / RECORDS / "rank00000.json").write_text('{"hashes": 5}')
    with pytest.raises(UnreadableError, match=r"rank00000\.json: hashes "):
        await_records(tmp_path, 1)


def test_rank_0_counts_the_others(tmp_path: Path) -> None:
    assert num_others(tmp_path) == 0
    for rank in (0, 1, 3):
        write_record(tmp_path, rank, RankRecord())
    assert num_others(tmp_path) == 2

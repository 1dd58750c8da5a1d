"""What each rank reports of its part of a checkpoint, in a file that rank 0 waits for: a save sends no messages.

    records/rank00003.json     the hashes of its file and its amax histories, or the words of its error

A record has its name only when it is whole and on the disk, after the file that it is about. The folder is removed
before the checkpoint gets its name. All ranks see one file system; some show a new file only seconds later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quantexp.errors import RunError
from quantexp.model.checkpoint_hashes import FileHash
from quantexp.model.training_state import History
from quantexp.reading.json_files import require_json
from quantexp.runs.status import write_json

#: The folder of the records in a checkpoint that is being written.
RECORDS = "records"
#: Seconds between two looks for records, at first and at most.
_FIRST_POLL_S, _MOST_POLL_S = 0.005, 0.5


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank."""

    #: Its error in one line; None if its part is on the disk.
    error: str | None = None
    #: By its file's name.
    hashes: dict[str, FileHash] = field(default_factory=dict)
    #: By stream; ranks that share a stream have equal histories of it.
    amax_histories: dict[str, History] = field(default_factory=dict)


def write_record(part: Path, rank: int, record: RankRecord) -> None:
    """Write a rank's record into the folder of a checkpoint that is being written.

    Raises:
        OSError: it cannot be written.
    """
    (part / RECORDS).mkdir(parents=True, exist_ok=True)
    write_json(_file(part, rank), asdict(record), is_durable=True)


def await_records(
    part: Path, num_ranks: int, is_abandoned: Callable[[], bool] = lambda: False
) -> list[RankRecord]:
    """The records of all ranks, by rank, as soon as they are there.

    Args:
        part: the folder of a checkpoint that is being written.
        num_ranks: how many there will be.
        is_abandoned: whether to stop waiting, because the ranks that are missing may have ended.

    Raises:
        RunError: the words of a rank that failed, without waiting for others; or the ranks that are missing.
        UnreadableError: a record is damaged.
    """
    records: dict[int, RankRecord] = {}
    poll_s = _FIRST_POLL_S
    while missing := [rank for rank in range(num_ranks) if rank not in records]:
        names = {path.name for path in (part / RECORDS).glob("*.json")}
        new = [rank for rank in missing if _file(part, rank).name in names]
        for rank in new:
            records[rank] = require_json(_file(part, rank), RankRecord)
            if (words := records[rank].error) is not None:
                raise RunError(words)
        if not new:
            if is_abandoned():
                shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
                raise RunError(f"{part} is not whole: nothing came from rank {shown}")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MOST_POLL_S)
    return [records[rank] for rank in range(num_ranks)]


def num_others(part: Path) -> int:
    """How many ranks besides rank 0 are done with their parts, failed ones too."""
    return sum(path != _file(part, 0) for path in (part / RECORDS).glob("*.json"))


def _file(part: Path, rank: int) -> Path:
    return part / RECORDS / f"rank{rank:05d}.json"

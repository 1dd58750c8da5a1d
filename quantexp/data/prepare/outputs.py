"""The outputs of the shards, in `PREFIX.partial`.

A process writes the output of its shard under a temporary name and renames it, so an output that exists is complete.
Its name, the input and the range of the shard, is the done-marker: a shard whose output exists is skipped.

When all outputs of an input exist, the list of them is written. An input that has one need not be read again: to
resume, or to join what several tasks made, is to read the outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from quantexp.data.prepare.partial import PartialFolder
from quantexp.data.prepare.shards import Shard
from quantexp.data.prepare.work import PARTS, Filters, Tally, work
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError, UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.runs.status import write_json
from quantexp.runs.work_folder import resumable, whole


@dataclass(frozen=True)
class Summary:
    """The counts of one output, and the rows of its unreadable records: file, line, reason."""

    tally: Tally
    rejected: list[dict[str, Any]]


@dataclass
class Outputs:
    """The outputs so far, in the order of the input, and their counts."""

    paths: list[Path] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    #: Bytes of all inputs, as stored.
    num_read: int = 0

    def add(self, path: Path, summary: Summary, num_read: int) -> None:
        """Adds the next one."""
        self.paths.append(path)
        self.tally.add(summary.tally)
        self.num_read = num_read


def make_output(shard: Shard, path: Path, tokenizer: Tokenizer, filters: Filters) -> Summary:
    """Works on a shard and writes its output.

    Raises:
        DataError: it cannot be written.
    """
    pieces, tally, rejected = work(shard, tokenizer, filters)
    rows = [{"file": shard.file, "line": r.place, "reason": r.reason} for r in rejected]
    arrays: dict[str, Any] = {
        "tally": np.array(json.dumps(asdict(tally))),
        "rejected": np.array(json.dumps(rows)),
    }
    arrays |= {
        f"{part}_{name}": array
        for part, piece in zip(PARTS, pieces, strict=True)
        for name, array in vars(piece).items()
    }
    with writing(path.parents[1]), whole(path) as stream:
        np.savez(stream, **arrays)
    return Summary(tally, rows)


def read_summary(path: Path) -> Summary | None:
    """Returns the counts of an output; None if it does not exist, is damaged or of another version."""
    try:
        tally, rejected = (json.loads(str(a)) for a in read_arrays(path, "tally", "rejected"))
        return Summary(Tally(**tally), rejected)
    except (DataError, TypeError):
        return None


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Returns arrays of an output, for instance `train_ids`; see `Piece`.

    Raises:
        DataError: the output is damaged.
    """
    try:
        with path.open("rb") as stream, np.load(stream) as arrays:
            return [arrays[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{path}: damaged ({error}): delete it and run the same command again"
        ) from error


def write_rejected(path: Path, outputs: Iterable[Path]) -> None:
    """Writes a JSON line for each unreadable record; no file if there is none."""
    path.unlink(missing_ok=True)
    for rows in _rejected(outputs):
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def first_rejected(outputs: Iterable[Path]) -> str | None:
    """Returns the place of the first unreadable record and the reason; None if there is none."""
    row = next((rows[0] for rows in _rejected(outputs)), None)
    return None if row is None else f"{row['file']}, line {row['line']}: {row['reason']}"


def _rejected(outputs: Iterable[Path]) -> Iterator[list[dict[str, Any]]]:
    """Yields the unreadable records of each output that has some."""
    everything = (json.loads(str(read_arrays(output, "rejected")[0])) for output in outputs)
    return (rows for rows in everything if rows)


def writing(path: Path) -> AbstractContextManager[None]:
    """Converts an OSError of a write into a message for the user.

    Raises:
        DataError: a write failed.
    """
    return resumable(path, DataError)


@dataclass(frozen=True)
class Listed:
    """One output of an input."""

    #: The name of its file.
    name: str
    #: Bytes of the input up to its end, as stored.
    num_read: int


def read_listing(folder: PartialFolder, index: int) -> list[Listed] | None:
    """Returns the outputs of an input in their order; None if it has no list, or a damaged one."""
    try:
        return read_json(folder.listing(index), list[Listed])
    except (FileNotFoundError, UnreadableError):
        return None


def write_listing(folder: PartialFolder, index: int, outputs: Sequence[Listed]) -> None:
    """Writes the list.

    Raises:
        DataError: it cannot be written.
    """
    with writing(folder.root):
        write_json(folder.listing(index), [asdict(output) for output in outputs])


def unfinished(folder: PartialFolder, among: Sequence[int]) -> list[int]:
    """Returns the inputs without a list: those that may have outputs to make."""
    return [index for index in among if not folder.listing(index).exists()]

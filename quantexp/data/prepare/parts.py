"""The files of an unfinished preparation, and how to resume it.

They are in a folder beside the result, `PREFIX.partial`. Files are only ever appended to, so truncating them to the
lengths in `state.json` restores the state at the time it was written.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from quantexp.data.prepare.chunks import Position
from quantexp.data.prepare.work import PARTS, ChunkResult, Tally
from quantexp.data.sources import Rejected
from quantexp.errors import DataError
from quantexp.runs.status import write_json


@dataclass(frozen=True)
class PartialFolder:
    """The folder `PREFIX.partial` and the paths of its files."""

    root: Path

    @property
    def state(self) -> Path:
        """The saved state."""
        return self.root / "state.json"

    @property
    def lock(self) -> Path:
        """Locked (flock) by the preparing process."""
        return self.root / ".lock"

    @property
    def rejected(self) -> Path:
        """One JSON line per unreadable record."""
        return self.root / "rejected.jsonl"

    @property
    def refused(self) -> Path:
        """The same list, kept for the user if there were too many."""
        return self.root / "too_many_rejected.jsonl"

    @property
    def index(self) -> Path:
        """The result's `.idx`, once all input is read."""
        return self.root / "pair.idx"

    @property
    def card(self) -> Path:
        """The result's card, the last file to be moved into place."""
        return self.root / "card.json"

    @property
    def tokenizer(self) -> Path:
        """A copy of the tokenizer's files."""
        return self.root / "tokenizer"

    def ids(self, part: str) -> Path:
        """The ids of a part's documents."""
        return self.root / f"{part}.bin"

    def lengths(self, part: str) -> Path:
        """The lengths of a part's documents, int32."""
        return self.root / f"{part}.lengths"

    def hashes(self, part: str) -> Path:
        """The hashes of a part's documents, if duplicates are dropped."""
        return self.root / f"{part}.hashes"

    def appended(self) -> list[Path]:
        """The files that grow while the input is read."""
        kinds = (self.ids, self.lengths, self.hashes)
        return [kind(part) for part in PARTS for kind in kinds] + [self.rejected]


@dataclass(frozen=True)
class Reached:
    """The position up to which the inputs were read."""

    #: Index of the input, from 0; the number of inputs when all are read.
    input: int = 0
    position: Position = field(default_factory=Position)
    #: Bytes of all inputs, as stored.
    num_read: int = 0


@dataclass
class State:
    """A state from which a preparation can resume."""

    #: Hash of the job: another job must not resume from here.
    job: str
    reached: Reached = field(default_factory=Reached)
    #: Bytes of each growing file, by name.
    sizes: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    #: Whether the result is complete in the partial folder and being moved into place.
    publishing: bool = False


@contextmanager
def sole_user(folder: PartialFolder) -> Iterator[None]:
    """Creates the folder and locks it; the folder remains.

    Raises:
        DataError: it cannot be created, or another process holds the lock.
    """
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        stream = folder.lock.open("a")
    except OSError as error:
        raise cannot_write(folder.root, error) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"{folder.root}: another process prepares there; wait for it, or give another "
                "dataset.path"
            ) from error
        yield


def read_state(folder: PartialFolder, job: str) -> State:
    """Returns the saved state; a new one if there is none, or it belongs to another job."""
    try:
        content = json.loads(folder.state.read_text())
        reached = content["reached"]
        position = Position(**reached["position"])
        content["reached"] = Reached(**{**reached, "position": position})
        content["tally"] = Tally(**content["tally"])
        state = State(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return State(job)
    return state if state.job == job else State(job)


class Writer:
    """Appends to the files of a partial folder, from a state on."""

    def __init__(self, folder: PartialFolder, state: State) -> None:
        """Opens the files and truncates them to the state's lengths.

        Raises:
            DataError: a file cannot be written, or is shorter than in the state.
        """
        self.folder, self.state = folder, state
        self._files: dict[str, IO[bytes]] = {}
        try:
            for path in folder.appended():
                with writing(path):
                    self._open(path, state.sizes.get(path.name, 0))
        except DataError:
            self.close()
            raise

    def _open(self, path: Path, size: int) -> None:
        stream = self._files[path.name] = path.open("ab")
        if stream.tell() < size:
            raise DataError(
                f"{path}: shorter than it was: delete {self.folder.root} and begin again"
            )
        stream.truncate(size)
        stream.seek(size)

    def append(self, name: str, result: ChunkResult, reached: Reached) -> None:
        """Appends the results of a chunk of the input `name`, and advances the state.

        After an interruption the state is unchanged: what was written of the chunk will be truncated.
        """
        folder = self.folder
        with writing(folder.root):
            for part, piece in zip(PARTS, result.pieces, strict=True):
                self._files[folder.ids(part).name].write(piece.ids)
                self._files[folder.lengths(part).name].write(piece.lengths)
                self._files[folder.hashes(part).name].write(piece.hashes)
            lines = "".join(_rejected_line(name, record) for record in result.rejected)
            self._files[folder.rejected.name].write(lines.encode())
            sizes = {name: stream.tell() for name, stream in self._files.items()}
        tally = deepcopy(self.state.tally)
        tally.add(result.tally)
        self.state = State(self.state.job, reached, sizes, tally)

    def save(self) -> None:
        """Saves the state after the last complete chunk, to resume from."""
        with writing(self.folder.root):
            for stream in self._files.values():
                stream.flush()
                os.fsync(stream.fileno())
        self.save_state()

    def save_state(self) -> None:
        """Writes only the state; the files are unchanged."""
        with writing(self.folder.root):
            write_json(self.folder.state, asdict(self.state))

    def list_rejected(self, name: str, result: ChunkResult) -> None:
        """Writes all rejected records so far, and those of a chunk that is not appended any more."""
        rejected = self._files[self.folder.rejected.name]
        with writing(self.folder.refused):
            rejected.flush()
            lines = "".join(_rejected_line(name, record) for record in result.rejected)
            self.folder.refused.write_bytes(self.folder.rejected.read_bytes() + lines.encode())

    def close(self) -> None:
        """Closes the files; what was not saved is truncated when they are opened again."""
        for stream in self._files.values():
            try:
                stream.close()
            except OSError:  # a full disk: reported when it was written
                continue


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts an OSError of a write into a message for the user.

    Raises:
        DataError: a write failed.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> DataError:
    """Returns the error for a failed write."""
    return DataError(
        f"cannot write {path}: {error.strerror}; free space or fix permissions, then run the same "
        "command again: it resumes where it stopped"
    )


def _rejected_line(name: str, record: Rejected) -> str:
    row = {"file": name, "line": record.place, "reason": record.reason}
    return json.dumps(row, ensure_ascii=False) + "\n"

"""The folder of an unfinished preparation, `PREFIX.partial`: its files and its lock.

One process that prepares has the folder alone. Tasks of a cluster's job, each of which makes the outputs of some
inputs, share it, and exclude every other preparation at that prefix. The lock is a flock, which ends with its process.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantexp.data.prepare.job import Job
from quantexp.data.prepare.outputs import writing
from quantexp.data.prepare.shards import Shard
from quantexp.data.prepared import read_card
from quantexp.errors import DataError

#: Seconds between two attempts at a lock that another process holds.
_STEP_S = 0.2


@dataclass(frozen=True)
class PartialFolder:
    """The folder `PREFIX.partial` and the paths of its files."""

    root: Path
    #: Hash of the job: another job must not resume from its outputs.
    job: str

    @property
    def lock(self) -> Path:
        """Locked (flock) by the preparing processes."""
        return self.root / ".lock"

    @property
    def submission(self) -> Path:
        """The newest submission to a cluster that prepares here."""
        return self.root / "submission.json"

    @property
    def outputs(self) -> Path:
        """The folder of the shards' outputs."""
        return self.root / self.job

    def output(self, index: int, shard: Shard) -> Path:
        """The output of a shard of an input, counted from 0."""
        return self.outputs / f"{index:05}-{shard.start:013}-{shard.end:013}.npz"

    def listing(self, index: int) -> Path:
        """The list of an input's outputs, which exists once all of them do."""
        return self.outputs / f"{index:05}.json"

    @property
    def too_many_rejected(self) -> Path:
        """The list of unreadable records, kept for the user if there were too many."""
        return self.root / "too_many_rejected.jsonl"

    @property
    def result(self) -> Path:
        """The prefix of the result before it is moved into place; its card is written last."""
        return self.root / "result"

    def is_complete(self) -> bool:
        """Whether the result of this job is complete and being moved into place."""
        card = read_card(self.result)
        return card is not None and card.job == self.job

    def begin(self) -> None:
        """Removes everything but the outputs of this job."""
        self.outputs.mkdir(exist_ok=True)
        for path in self.root.iterdir():
            if path.is_dir() and path != self.outputs:
                shutil.rmtree(path)
            elif path.is_file() and path not in (self.lock, self.submission):
                path.unlink()


def partial_folder(job: Job) -> PartialFolder:
    """Returns the folder of a job."""
    return PartialFolder(Path(f"{job.prefix}.partial"), job.hash)


@contextmanager
def sole_user(folder: PartialFolder, patience_s: float = 0.0) -> Iterator[None]:
    """Creates the folder and locks it for this process alone; the folder remains.

    Raises:
        DataError: it cannot be created, or other processes hold the lock for longer than `patience_s`.
    """
    with _locked(folder, fcntl.LOCK_EX, patience_s):
        yield


@contextmanager
def shared_user(folder: PartialFolder, patience_s: float = 0.0) -> Iterator[None]:
    """Creates the folder and its outputs' and locks it together with other tasks of the job; the folder remains.

    Raises:
        DataError: it cannot be created, or a process has it alone for longer than `patience_s`.
    """
    with _locked(folder, fcntl.LOCK_SH, patience_s):
        with writing(folder.root):
            folder.outputs.mkdir(exist_ok=True)
        yield


@contextmanager
def _locked(folder: PartialFolder, kind: int, patience_s: float) -> Iterator[None]:
    with writing(folder.root):
        folder.root.mkdir(parents=True, exist_ok=True)
        stream = folder.lock.open("a+")  # NFS shares a lock only of a file that is open for reading
    until = time.monotonic() + patience_s
    with stream:
        while True:
            try:
                fcntl.flock(stream, kind | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(_STEP_S)
                    continue
                raise DataError(
                    f"{folder.root}: another process prepares there; wait for it, or give another "
                    "dataset.path"
                ) from error
        yield

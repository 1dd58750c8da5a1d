"""The folder of unfinished work that jobs of a cluster may share, `RESULT.partial`: its files and its lock.

    .lock             a flock, which ends with its process
    submission.json   the newest submission to a cluster
    HASH/             the partial results of the work with this hash: other work never resumes from them

A process that submits has the folder alone.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import BinaryIO

from quantexp.errors import QuantexpError

#: Seconds between two attempts at a lock that another process holds.
_STEP_S = 0.2


@dataclass(frozen=True)
class WorkFolder:
    """The folder, the paths of its files, and the words of messages about it."""

    root: Path
    #: The hash of the work.
    job: str
    #: What a process does there, as in `another process draws there`.
    activity: str
    #: What names another place for the result: `dataset.path`, `--out`.
    elsewhere: str
    #: The class of errors.
    error: type[QuantexpError]

    @property
    def lock(self) -> Path:
        """Locked (flock) by the processes that work there."""
        return self.root / ".lock"

    @property
    def submission(self) -> Path:
        """The newest submission to a cluster."""
        return self.root / "submission.json"

    @property
    def outputs(self) -> Path:
        """The folder of the partial results."""
        return self.root / self.job

    def begin(self) -> None:
        """Removes everything but the partial results of this work.

        Raises:
            OSError: the folder cannot be written.
        """
        self.outputs.mkdir(exist_ok=True)
        for path in self.root.iterdir():
            if path.is_dir() and path != self.outputs:
                shutil.rmtree(path)
            elif path.is_file() and path not in (self.lock, self.submission):
                path.unlink()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Converts an OSError of a write into a message for the user.

        Raises:
            QuantexpError: of the class `error`; a write failed.
        """
        with resumable(self.root, self.error):
            yield

    @contextmanager
    def alone(self, patience_s: float = 0.0) -> Iterator[None]:
        """Creates the folder and locks it for this process alone; the folder remains.

        Raises:
            QuantexpError: of the class `error`; the folder cannot be created, or other processes hold the lock for
                longer than `patience_s`.
        """
        with self.locked(fcntl.LOCK_EX, patience_s):
            yield

    @contextmanager
    def locked(self, kind: int, patience_s: float) -> Iterator[None]:
        """Creates the folder and locks it, with a kind of flock's; raises as `alone`."""
        with self.writing():
            self.root.mkdir(parents=True, exist_ok=True)
            stream = self.lock.open("a+")  # NFS shares a lock only of a file open for reading
        until = time.monotonic() + patience_s
        with stream:
            while not _is_locked(stream.fileno(), kind):
                if time.monotonic() >= until:
                    raise self.error(
                        f"{self.root}: another process {self.activity} there; wait for it, or give another "
                        f"{self.elsewhere}"
                    )
                time.sleep(_STEP_S)
            yield


@contextmanager
def resumable(path: Path, error: type[QuantexpError]) -> Iterator[None]:
    """Converts an OSError of a write into a message for the user, who may repeat the command.

    Raises:
        QuantexpError: of the class `error`; a write failed.
    """
    try:
        yield
    except OSError as failure:
        raise error(
            f"cannot write {path}: {failure.strerror}; free space or fix permissions, then run the same "
            "command again: it resumes where it stopped"
        ) from failure


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Writes a partial result: under a name of this process, then on the disk, then renamed.

    The name is the process's own, because the scheduler may start a task again while the lost node still works on the
    same part.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_suffix(f".{platform.node()}-{os.getpid()}-{get_ident()}.unfinished")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_locked(descriptor: int, kind: int) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

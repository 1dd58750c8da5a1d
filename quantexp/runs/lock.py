"""The lock of a run folder: held by whoever starts or runs it, released by any death of its holder.

It is a flock on `.lock`, so nothing stale is ever left: the file stays, the lock goes with the last process that has it
open. Its holder's children may inherit it, so that a worker outlives its parent with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from quantexp.errors import RunError, RunInUseError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import read_status

#: Seconds for which a lock that is taken is tried again: somebody may only have looked whether it is.
PROBE_S = 0.3
#: How the system says that another process has a lock.
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


def take_lock(run: RunDir, patience_s: float = PROBE_S) -> int:
    """The file descriptor that holds the folder's lock; closing it gives the lock back.

    Raises:
        RunInUseError: another process has it for longer than `patience_s`.
        RunError: the folder cannot be written, or its disk has no locks.
    """
    try:
        lock = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(run, error) from error
    try:
        _wait_for(lock, run, time.monotonic() + patience_s)
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_locked(run: RunDir) -> bool:
    """Whether a process has the lock now; looking takes no longer than an instant, which `take_lock` waits out."""
    return is_held(run.lock)


def hold(file: Path) -> int:
    """The file descriptor that holds a lock nobody else wants to hold, for others to see that its holder lives.

    Raises:
        OSError: the file cannot be written, or its disk has no locks.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        os.close(lock)
        raise
    return lock


def is_held(file: Path) -> bool:
    """Whether a process holds the lock on this file now."""
    try:
        lock = os.open(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in TAKEN  # else the disk has no locks, and nobody can hold one
    finally:
        os.close(lock)
    return False


def cannot_write(run: RunDir, error: OSError) -> RunError:
    """The error for a folder that cannot be written."""
    return RunError(
        f"the run folder {run.root} cannot be written: {error.strerror}; set paths.root to a folder that can"
    )


def _wait_for(lock: int, run: RunDir, until: float) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in TAKEN:
                raise RunError(
                    f"{run.lock} cannot be locked: {error.strerror}; set paths.root to a folder on a disk with locks"
                ) from error
            if time.monotonic() > until:
                raise RunInUseError(
                    f"{run.root} is in use by {_holder(run)}; wait for it, or stop it first"
                ) from error
        time.sleep(PROBE_S / 10)


def _holder(run: RunDir) -> str:
    try:
        status = read_status(run.status)
    except RunError:  # whatever it says, the folder is in use
        status = None
    if status is None or status.pid is None:
        return "another process"
    return f"process {status.pid} on {status.host}"

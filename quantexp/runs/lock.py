"""The lock of a run folder. The lock holder starts or executes the run; the end of its process releases the lock.

It is a flock on `.lock`, so a lock cannot become stale: the file stays, and the kernel releases the lock when the last
process that has the file open ends. Child processes inherit the lock, so a worker that outlives its parent keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from quantexp.errors import RunError, RunInUseError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import read_status

#: Seconds to retry a lock that is taken: another process may only be probing it.
PROBE_S = 0.3
#: Error numbers that mean: another process holds the lock.
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


def take_lock(run: RunDir, patience_s: float = PROBE_S) -> int:
    """Take the folder's lock and return its file descriptor; closing the descriptor releases the lock.

    Raises:
        RunInUseError: another process holds the lock for longer than `patience_s`.
        RunError: the folder cannot be written, or its disk has no locks.
    """
    try:
        lock = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cannot_write(run, error) from error
    try:
        _wait_for(lock, run, time.monotonic() + patience_s)
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def locked(run: RunDir, patience_s: float = PROBE_S) -> Iterator[int]:
    """Hold the folder's lock in this context; yields its file descriptor, and raises as `take_lock`."""
    lock = take_lock(run, patience_s)
    try:
        yield lock
    finally:
        os.close(lock)


def is_locked(run: RunDir) -> bool:
    """Whether a process holds the folder's lock; the probe itself takes the lock for an instant, see `PROBE_S`."""
    return is_held(run.lock)


def hold(file: Path) -> int:
    """Lock a file that only this process locks, so that others see that this process is alive; returns the descriptor.

    Raises:
        OSError: the file cannot be written, or its disk has no locks.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        os.close(lock)
        raise
    return lock


def is_held(file: Path) -> bool:
    """Whether a process holds the lock on this file."""
    try:
        lock = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in TAKEN  # any other error: the disk has no locks
    finally:
        os.close(lock)
    return False


def cannot_write(run: RunDir, error: OSError) -> RunError:
    """The error for a folder that cannot be written."""
    return RunError(
        f"the run folder {run.root} cannot be written: {error.strerror}; set paths.root to a folder that can"
    )


def may_write(run: RunDir) -> bool:
    """Whether this user may start a run in an existing folder; each part that a start moves or opens is asked."""
    parts = (run.root, run.lock, run.logs)
    return all(os.access(part, os.W_OK) for part in parts if os.path.lexists(part))


def _wait_for(lock: int, run: RunDir, deadline_s: float) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in TAKEN:
                raise RunError(
                    f"{run.lock} cannot be locked: {error.strerror}; set paths.root to a folder on a disk with locks"
                ) from error
            if time.monotonic() > deadline_s:
                raise RunInUseError(
                    f"{run.root} is in use by {_holder(run)}; wait for it, or stop it first"
                ) from error
        time.sleep(PROBE_S / 10)


def _holder(run: RunDir) -> str:
    try:
        status = read_status(run.status)
    except RunError:  # the folder is in use, whatever its status holds
        status = None
    if status is None or status.pid is None:
        return "another process"
    return f"process {status.pid} on {status.host}"

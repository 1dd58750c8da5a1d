"""Finds the processes of local runs by the lock they hold, because a process id may have been reused.

`quantexp` holds the lock of a run's folder and shares it with its child: the worker, or torchrun, which starts the
workers. One `quantexp` may hold the locks of several runs; each child holds only the lock of its own run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

#: Part of the command line of a worker, and of the torchrun that starts workers.
WORKER = "quantexp.training.worker"
#: Words in /proc/PID/fdinfo/FD of an open file that holds an exclusive flock.
_HOLDS = ("FLOCK", "WRITE")


def is_worker(pid: int) -> bool:
    """Whether the process with this id is a quantexp worker."""
    try:
        return WORKER in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def workers(locks: list[Path]) -> dict[Path, psutil.Process]:
    """Lock -> the process to end in order to end the run: its worker, or its torchrun.

    Processes of other users, containers and machines are invisible; their locks are absent.
    """
    lock_files = {str(lock.absolute()): lock for lock in locks}
    holders: dict[Path, dict[int, psutil.Process]] = {}
    for process in psutil.process_iter() if lock_files else ():
        for path in _locked_by(process, lock_files):
            holders.setdefault(lock_files[path], {})[process.pid] = process
    return {lock: _first(processes) for lock, processes in holders.items()}


def taker(lock: Path) -> psutil.Process | None:
    """The process that took the lock of a run's folder, which is the `quantexp` that waits for its worker.

    None if the kernel does not name one that is visible here.
    """
    try:
        inode = lock.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for fields in map(str.split, lines):
        # 1: FLOCK ADVISORY WRITE 4711 08:01:123456 0 EOF
        if len(fields) > 5 and fields[1] == _HOLDS[0] and fields[5].endswith(f":{inode}"):
            with contextlib.suppress(psutil.Error, ValueError):
                return psutil.Process(int(fields[4]))
    return None


def _locked_by(process: psutil.Process, lock_files: dict[str, Path]) -> list[str]:
    try:
        if WORKER not in process.cmdline():
            return []
        files = [(file.path, file.fd) for file in process.open_files() if file.path in lock_files]
    except psutil.Error:
        return []
    return [path for path, fd in files if _holds(process.pid, fd)]


def _holds(pid: int, fd: int) -> bool:
    """Whether this open file holds the lock, and does not only probe it."""
    try:
        lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return False
    locks = [line for line in lines if line.startswith("lock:")]
    return any(all(word in line for word in _HOLDS) for line in locks)


def _first(processes: dict[int, psutil.Process]) -> psutil.Process:
    """The process that is not a child of the others."""
    for process in processes.values():
        try:
            if process.ppid() not in processes:
                return process
        except psutil.Error:
            continue
    return next(iter(processes.values()))

"""The processes of local runs, known by the lock they hold and not by a number that may be another's by now.

`quantexp` holds the lock of a run's folder and shares it with what it starts: the worker, or torchrun, which starts the
workers. One `quantexp` may hold the locks of several runs; what it started for each holds that one's alone.
"""

from __future__ import annotations

from pathlib import Path

import psutil

#: In the command line of a worker, and of the torchrun that starts workers.
WORKER = "quantexp.training.worker"
#: How the kernel writes, in /proc/PID/fdinfo/FD, that an open file holds an exclusive flock.
_HOLDS = ("FLOCK", "WRITE")


def is_worker(pid: int) -> bool:
    """Whether a process of this number runs a worker of quantexp now."""
    try:
        return WORKER in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def workers(locks: list[Path]) -> dict[Path, psutil.Process]:
    """For each lock that a run holds, the process to end if the run is to end: its worker, or its torchrun.

    Processes of other users, containers and machines cannot be seen; their locks are absent.
    """
    wanted = {str(lock.absolute()): lock for lock in locks}
    holders: dict[Path, dict[int, psutil.Process]] = {}
    for process in psutil.process_iter() if wanted else ():
        for path in _locked_by(process, wanted):
            holders.setdefault(wanted[path], {})[process.pid] = process
    return {lock: _first(processes) for lock, processes in holders.items()}


def _locked_by(process: psutil.Process, wanted: dict[str, Path]) -> list[str]:
    try:
        if WORKER not in process.cmdline():
            return []
        files = [(file.path, file.fd) for file in process.open_files() if file.path in wanted]
    except psutil.Error:
        return []
    return [path for path, fd in files if _holds(process.pid, fd)]


def _holds(pid: int, fd: int) -> bool:
    """Whether this open file holds the lock, rather than looking whether somebody does."""
    try:
        lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return False
    locks = [line for line in lines if line.startswith("lock:")]
    return any(all(word in line for word in _HOLDS) for line in locks)


def _first(processes: dict[int, psutil.Process]) -> psutil.Process:
    """The one that the others come from."""
    for process in processes.values():
        try:
            if process.ppid() not in processes:
                return process
        except psutil.Error:
            continue
    return next(iter(processes.values()))

"""Notices from outside that a process makes no progress: it is stopped, or waits for something that does not come.

`/proc` says what a process does without its help. It works while one of its threads runs or is ready to run, it uses
processor time, or it reads or writes; a child that it waits for (a compiler) counts too. Whether work leads anywhere
cannot be seen, so an endless loop is work, and so is the wait for a GPU, in which CUDA polls.

Time counts as silence only as this process sees it pass. While the machine sleeps, CLOCK_MONOTONIC stands still
(Linux). While this process is stopped together with the other (Ctrl-Z, a suspended job), it looks at nothing, and a
long gap between two looks counts as nothing. On systems without `/proc` every process works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

#: The part of a processor that a process uses at least while it works; idle threads that poll use less.
WORKING_SHARE = 0.05
#: A limit divided by this gives the time between two looks.
LOOKS = 10
#: After a gap of two steps and this many seconds, this process was not looking.
LONGEST_GAP_S = 10.0
#: Bytes that a process reads or writes at least in a second while it works.
WORKING_BYTES_PER_S = 1024.0
#: How many times longer a process may wait for a disk (state D): a large file may take long to reach a slow one.
DISK_PATIENCE = 10.0
#: States of a process that a signal or a debugger has stopped.
STOPPED = "Tt"
_TICKS = os.sysconf("SC_CLK_TCK")
_WORDS = {
    "T": "the process was stopped by a signal (state T)",
    "t": "the process was stopped by a debugger (state t)",
    "D": "the process waits for a disk (state D)",
}


@dataclass(frozen=True)
class Signs:
    """What `/proc` says of a process."""

    #: The state of its main thread, one letter; R if any thread runs or is ready to run.
    state: str
    #: Processor time of the process and its children, ended ones included.
    cpu_s: float
    #: Bytes read and written.
    num_bytes: int


@dataclass(frozen=True)
class Silence:
    """A process without progress."""

    seconds: float
    state: str

    def __str__(self) -> str:
        return _WORDS.get(
            self.state, f"the process waits and does not say for what (state {self.state})"
        )


class Watch:
    """Looks at one process again and again."""

    def __init__(
        self,
        pid: int,
        limit_s: float,
        *,
        may_wait: float | None = 1.0,
        read: Callable[[int], Signs | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch a process.

        Args:
            pid: the process.
            limit_s: how long a stopped process may be silent.
            may_wait: how many times longer one that waits may be; None if waiting is all that it does.
            read: for tests, in the place of `signs_of`.
            clock: for tests.
        """
        self._pid, self._limit_s, self._may_wait = pid, limit_s, may_wait
        self._read, self._clock = read or signs_of, clock
        self._step_s = limit_s / LOOKS
        self._looked_at = clock()
        self._before = self._read(pid)
        #: Seconds without progress, and the part of the patience that they have used.
        self._silent_s = self._used = 0.0

    def look(self) -> Silence | None:
        """The silence of the process if it has lasted too long; call several times in `limit_s`."""
        elapsed_s = self._clock() - self._looked_at
        if elapsed_s < self._step_s:
            return None
        self._looked_at = self._clock()
        now, before = self._read(self._pid), self._before
        self._before = now
        if elapsed_s > 2 * self._step_s + LONGEST_GAP_S:
            return None
        if now is None or before is None or self._works(before, now, elapsed_s):
            self._silent_s = self._used = 0.0
            return None
        self._silent_s += elapsed_s
        self._used += elapsed_s / self._patience_s(now.state)
        # Ten steps of a tenth add up to a little less than one.
        return Silence(self._silent_s, now.state) if self._used > 1 - 1e-9 else None

    def _works(self, before: Signs, now: Signs, elapsed_s: float) -> bool:
        if now.state in STOPPED:
            return False
        if self._may_wait is None or now.state == "R":
            return True
        computes = now.cpu_s - before.cpu_s >= WORKING_SHARE * elapsed_s
        return computes or now.num_bytes - before.num_bytes >= WORKING_BYTES_PER_S * elapsed_s

    def _patience_s(self, state: str) -> float:
        if state in STOPPED:
            return self._limit_s
        return self._limit_s * (DISK_PATIENCE if state == "D" else self._may_wait or 1.0)


def signs_of(pid: int) -> Signs | None:
    """What `/proc` says of a process; None if it is gone, or if there is no `/proc`."""
    try:
        state, cpu_s = _stat(Path(f"/proc/{pid}/stat"))
        threads = [_stat(task / "stat")[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    except (OSError, ValueError):
        return None
    if state not in STOPPED and "R" in threads:
        state = "R"
    return Signs(state, cpu_s + _cpu_s_of_children(pid), _bytes(pid))


def _stat(file: Path) -> tuple[str, float]:
    """State and processor time of a process or thread, with that of its children that have ended (proc(5)).

    The name before may hold spaces and brackets.
    """
    fields = file.read_bytes().rpartition(b") ")[2].split()
    if len(fields) < 15:
        raise ValueError(f"{file} has {len(fields)} fields")
    return fields[0].decode(), sum(map(int, fields[11:15])) / _TICKS


def _bytes(pid: int) -> int:
    """0 where the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError):
        return 0


def _cpu_s_of_children(pid: int) -> float:
    total = 0.0
    try:
        for child in psutil.Process(pid).children(recursive=True):
            total += sum(child.cpu_times()[:4])  # with that of its own children that have ended
    except psutil.Error:
        pass
    return total

"""Watches the workers of a run from the process that started them.

A rank that only waits for another gets twice `launcher.timeout_min`: its own wait ends after once that time, and its
error then says whom it waited for. torchrun does nothing but wait; it counts as silent only while it is stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

from quantexp.processes.silence import Watch
from quantexp.runs.outcome import UnresponsiveError
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import ENDED_SILENTLY, RANK_MAY_WAIT, record_silent_end
from quantexp.runs.status import now, read_status
from quantexp.schema import LauncherConfig


class RunWatch:
    """Watches a worker, or torchrun and its ranks, of which it remembers how long each was alive."""

    def __init__(
        self,
        run: RunDir,
        launcher: LauncherConfig,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._num, self._clock = run, launcher.num_processes, clock
        self._timeout_min = launcher.timeout_min
        self._first = psutil.Process(pid)
        #: For each rank, and for torchrun (None).
        self._watches: dict[int | None, tuple[psutil.Process, Watch]] = {}
        if self._num == 1:
            self._watches[0] = self._first, Watch(pid, self._timeout_min * 60)
        else:
            own = Watch(pid, self._timeout_min * 60, may_wait=None)
            self._watches[None] = self._first, own
        self._alive_until: dict[int, str] = {}
        self._ended_at: float | None = None
        #: Everything that torchrun has started.
        self.below: set[psutil.Process] = set()

    def look(self) -> bool:
        """Call several times a second; false once rank 0 ended so long ago that another rank must be hanging.

        Raises:
            UnresponsiveError: a process makes no progress.
        """
        if self._num > 1:
            self.find_below()
        for rank, (process, watch) in self._watches.items():
            if self._num > 1 and rank is not None and _lives(process):
                self._alive_until[rank] = now()
            if (silence := watch.look()) is not None:
                raise UnresponsiveError(self._run, rank, silence, self._timeout_min)
        return self._num == 1 or not self._is_overdue()

    def find_below(self) -> None:
        """Find what torchrun has started until now."""
        with contextlib.suppress(psutil.Error):
            self.below |= set(self._first.children(recursive=True))
            if len(self._watches) <= self._num:
                for process in self._first.children():
                    rank = _rank_of(process)
                    if rank is not None and rank not in self._watches:
                        watch = Watch(process.pid, self._timeout_min * 60, may_wait=RANK_MAY_WAIT)
                        self._watches[rank] = process, watch

    def record_ends(self) -> None:
        """Write the end of each rank that has not recorded one: the last time at which it was seen alive."""
        for rank, alive_until in self._alive_until.items():
            record_silent_end(self._run, rank, ENDED_SILENTLY, alive_until)

    def _is_overdue(self) -> bool:
        if self._ended_at is None:
            status = read_status(self._run.status)
            if status is None or status.finished is None:
                return False
            self._ended_at = self._clock()
        return self._clock() - self._ended_at > self._timeout_min * 60


def _rank_of(process: psutil.Process) -> int | None:
    """The rank of a worker; None for another process, or until the process has started its program."""
    try:
        value = process.environ().get("RANK", "")
    except psutil.Error:
        return None
    return int(value) if value.isdecimal() else None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False

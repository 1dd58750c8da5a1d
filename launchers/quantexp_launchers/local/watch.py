"""Watches the workers of a run from the process that started them, and raises if one makes no progress.

A rank that only waits for another gets twice `launcher.timeout_min`: its own wait ends after once that time, and its
error then says whom it waited for. torchrun does nothing but wait; it counts as silent only while it is stopped.
"""

from __future__ import annotations

import contextlib

import psutil

from quantexp.processes.silence import Watch
from quantexp.runs.outcome import UnresponsiveError
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import ENDED_SILENTLY, RANK_MAY_WAIT, record_silent_end
from quantexp.runs.status import now


def require_progress(run: RunDir, rank: int | None, watch: Watch, timeout_min: float) -> None:
    """Call several times a second.

    Raises:
        UnresponsiveError: the watched process makes no progress.
    """
    if (silence := watch.look()) is not None:
        raise UnresponsiveError(run, rank, silence, timeout_min)


class RankWatch:
    """Watches torchrun and its ranks, and remembers how long each rank was alive."""

    def __init__(self, run: RunDir, torchrun: int, num_processes: int, timeout_min: float) -> None:
        self._run, self._num, self._timeout_min = run, num_processes, timeout_min
        self._torchrun = psutil.Process(torchrun)
        self._own_watch = Watch(torchrun, timeout_min * 60, may_wait=None)
        self._ranks: dict[int, tuple[psutil.Process, Watch]] = {}
        self._alive_until: dict[int, str] = {}

    def look(self) -> None:
        """Call several times a second.

        Raises:
            UnresponsiveError: torchrun or a rank makes no progress.
        """
        if len(self._ranks) < self._num:
            self._find_ranks()
        for rank, (process, watch) in self._ranks.items():
            if _lives(process):
                self._alive_until[rank] = now()
            require_progress(self._run, rank, watch, self._timeout_min)
        require_progress(self._run, None, self._own_watch, self._timeout_min)

    def record_ends(self) -> None:
        """Write the end of each rank that has not recorded one: the last time at which it was seen alive."""
        for rank, alive_until in self._alive_until.items():
            record_silent_end(self._run, rank, ENDED_SILENTLY, alive_until)

    def _find_ranks(self) -> None:
        known = {process for process, _ in self._ranks.values()}
        with contextlib.suppress(psutil.Error):
            for process in self._torchrun.children():
                if process not in known and (rank := _rank_of(process)) is not None:
                    watch = Watch(process.pid, self._timeout_min * 60, may_wait=RANK_MAY_WAIT)
                    self._ranks[rank] = process, watch


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

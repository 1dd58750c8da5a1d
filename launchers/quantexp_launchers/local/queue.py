"""Executes a sweep: starts pending runs in free slots, and collects their outcomes.

A pool has a thread for each slot, which opens the run's folder, starts the worker and waits for it (a worker ends with
the thread that started it). The main thread decides what starts. Several processes may execute the same runs: the lock
holder executes the run; the others postpone it, execute other runs meanwhile, and take over its outcome, or the run
itself if it was only interrupted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from rich.markup import escape

from quantexp.errors import RunError
from quantexp.launch.outcome import Outcome, outcome
from quantexp.runs.fencing import claimant
from quantexp.runs.lock import is_locked
from quantexp.runs.outcome import record_cancellation
from quantexp.runs.status import State
from quantexp_launchers.local.display import Display
from quantexp_launchers.local.execute import carry_out
from quantexp_launchers.local.slots import Slot
from quantexp_launchers.local.stop import Stop
from quantexp_launchers.local.sweep import Item, Place, Sweep
from quantexp_launchers.local.warm import WarmStart

#: Seconds between two updates of the main loop.
TICK_S = 0.2
#: Seconds between two checks of runs that other processes execute.
LOOK_S = 0.5
#: Seconds within which a Ctrl-C that reached a worker reaches this process too.
SIGNAL_S = 0.5


class Queue:
    """Executes the runs of a sweep in slots."""

    def __init__(self, sweep: Sweep, slots: Sequence[Slot], stop: Stop, display: Display) -> None:
        self.sweep, self.stop, self.display = sweep, stop, display
        self.free = list(slots)
        waiting = sum(item.place is not Place.DONE for item in sweep.items)
        #: Of a slot that executes several runs.
        self.warm = {slot: WarmStart() for slot in slots if waiting > len(slots)}
        self.running: dict[Future[Outcome | None], tuple[Item, Slot]] = {}
        self._looked_at = 0.0

    def work(self) -> None:
        """Execute until every run is done, or until a stop was requested and no run is running."""
        with contextlib.ExitStack() as last, ThreadPoolExecutor(len(self.free)) as pool:
            for warm in self.warm.values():
                last.callback(warm.close)
            try:
                while self._has_work():
                    if not self.stop.requested:
                        self._fill_slots(pool)
                    self._wait()
                    self.display.update(self.stop.count)
            except BaseException:  # a bug here must not leave workers behind
                self.stop.count += 2
                raise
        if self.stop.requested:
            self._drop_pending("its sweep was interrupted before it started")

    def _has_work(self) -> bool:
        if self.running:
            return True
        all_done = all(item.place is Place.DONE for item in self.sweep.items)
        return not self.stop.requested and not all_done

    def _fill_slots(self, pool: ThreadPoolExecutor) -> None:
        """Start a run in every free slot; sometimes also look at those that other processes execute."""
        stage, places = self._stage(), {Place.WAITING}
        if self.free and time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            places.add(Place.IN_USE)
        for item in self.sweep.items:
            if not self.free:
                return
            if item.place not in places or item.stage != stage:
                continue
            if _is_in_use(item):
                item.place = Place.IN_USE
            else:
                item.place, slot = Place.RUNNING, self.free.pop(0)
                self.display.started(item)
                self.running[pool.submit(self._run, item, slot)] = item, slot

    def _stage(self) -> int:
        """The first unfinished stage; drops the stages after a run that did not complete."""
        for item in self.sweep.items:
            if item.place is Place.DONE and not item.completed:
                reason = f"not started, because {item.label} has to complete first and is {item.state.value}"
                self._drop_pending(reason, after=item.stage)
        unfinished = [item.stage for item in self.sweep.items if item.place is not Place.DONE]
        return min(unfinished, default=0)

    def _drop_pending(self, reason: str, after: int = -1) -> None:
        """Mark pending runs, all or those of later stages, as not started for this reason."""
        for item in self.sweep.items:
            if item.stage > after and item.place in (Place.WAITING, Place.IN_USE):
                item.place, item.reason = Place.DONE, reason
                item.hold_back(reason)
                if item.run is not None:
                    with contextlib.suppress(RunError):  # the folder is gone; `reason` remains
                        item.outcome = outcome(item.experiment, item.run)

    def _run(self, item: Item, slot: Slot) -> Outcome | None:
        """Execute a run in a thread of the pool; None if a stop was requested before it started."""
        slot.enter()
        experiment = item.experiment
        with self.sweep.opened(item, self.display.say) as (folder, lock):
            if folder.ready:
                watch = self.stop.watch()
                if self.stop.requested:
                    return None
                assert lock is not None
                variables, warm = slot.variables(experiment.launcher), self.warm.get(slot)
                carry_out(experiment, folder, lock, watch, variables, warm=warm)
                self._record_cancellation(item)
            return outcome(experiment, folder.run, folder.skipped, folder.elsewhere)

    def _record_cancellation(self, item: Item) -> None:
        """Record that a run was cancelled by itself while its sweep continues, so that no process takes it over."""
        assert item.run is not None
        if outcome(item.experiment, item.run).state is not State.CANCELLED:
            return
        deadline = time.monotonic() + SIGNAL_S
        while time.monotonic() < deadline and not self.stop.requested:
            time.sleep(SIGNAL_S / 10)
        if not self.stop.requested:
            record_cancellation(item.run)

    def _wait(self) -> None:
        """Wait up to TICK_S for the end of a run, and handle the runs that have ended."""
        if not self.running:
            time.sleep(TICK_S)
        for future in wait(self.running, TICK_S, FIRST_COMPLETED).done:
            item, slot = self.running.pop(future)
            self.free.append(slot)
            with item.settled(self.display.bug):
                item.outcome = future.result()
                item.place = Place.WAITING if item.outcome is None else Place.DONE
            if item.place is Place.DONE:
                self._write()
            self.display.ended(item)

    def _write(self) -> None:
        """Write the list; an error only prints a message, because the list is written again at the end."""
        try:
            self.sweep.write()
        except RunError as error:
            self.display.say(f"[red]{escape(str(error))}[/]")


def _is_in_use(item: Item) -> bool:
    return item.run is not None and (is_locked(item.run) or claimant(item.run) is not None)

"""Works through a sheet: starts what may start wherever a slot is free, and learns how each run ended.

Every run has a thread, which opens its folder, starts its worker and waits for it (a worker ends with the thread that
started it, so the thread stays for as long). The main thread alone decides and shows. Several processes may work
through the same runs: who has a folder's lock runs it, the others put it off, do others meanwhile, and take how it
ended; what was only interrupted is taken over.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape

from quantexp.errors import QuantexpError, RunError, RunInUseError
from quantexp.launch.attempt import open_run
from quantexp.launch.outcome import Outcome, outcome
from quantexp.runs.device import device_class
from quantexp.runs.lock import is_locked
from quantexp.runs.outcome import record_cancellation
from quantexp.runs.status import State
from quantexp.schema import LauncherConfig
from quantexp_launchers.local.display import Display
from quantexp_launchers.local.execute import carry_out
from quantexp_launchers.local.hold_back import hold_back
from quantexp_launchers.local.sheet import Item, Place, Sheet
from quantexp_launchers.local.slots import Slot
from quantexp_launchers.local.stop import Stop

#: Seconds between two looks at what goes on.
TICK_S = 0.2
#: Seconds between two looks at whether runs of other processes have ended.
LOOK_S = 0.5
#: Seconds in which a Ctrl-C that a worker got reaches this process too.
SIGNAL_S = 0.5


@dataclass(frozen=True)
class Ended:
    """A thread's last words: how the run ended, why it could not start, or neither: somebody else has it, or we end."""

    item: Item
    slot: Slot
    outcome: Outcome | None = None
    reason: str | None = None
    in_use: bool = False
    #: The traceback of a bug.
    trace: str = ""


@dataclass(frozen=True)
class Notice:
    """Something to tell the user about a run."""

    item: Item
    text: str


class Queue:
    """The runs of a sheet on their way through the slots."""

    def __init__(self, sheet: Sheet, slots: Sequence[Slot], stop: Stop, display: Display) -> None:
        self.sheet, self.stop, self.display = sheet, stop, display
        self.free = list(slots)
        self.device = device_class(LauncherConfig())
        self.events: queue.SimpleQueue[Ended | Notice] = queue.SimpleQueue()
        self.threads: dict[int, threading.Thread] = {}
        self._looked = 0.0

    def work(self) -> None:
        """Until every run is over, or an end was asked for and none goes on any more."""
        try:
            while self._goes_on():
                if not self.stop.requested:
                    self._look_at_others()
                    self._fill()
                self._learn()
                self.display.update(self.stop.count)
        except BaseException:  # a bug of ours must not leave workers behind
            self.stop.count += 2
            raise
        finally:
            for thread in self.threads.values():
                thread.join()
        if self.stop.requested:
            self._leave("its sweep was interrupted before it started")

    def _goes_on(self) -> bool:
        if self.threads:
            return True
        over = all(item.place is Place.OVER for item in self.sheet.items)
        return not self.stop.requested and not over

    def _look_at_others(self) -> None:
        """What another process has let go of is to be looked at again."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        for item in self.sheet.items:
            if item.place is Place.IN_USE and not _is_in_use(item):
                item.place = Place.WAITING

    def _fill(self) -> None:
        """Give every free slot a run."""
        stage = self._stage()
        for item in self.sheet.items:
            if not self.free:
                return
            if item.place is not Place.WAITING or item.stage != stage:
                continue
            if _is_in_use(item):
                item.place = Place.IN_USE
            else:
                self._start(item, self.free.pop(0))

    def _stage(self) -> int:
        """The first stage that is not over; where one did not complete, those after it are not started."""
        for item in self.sheet.items:
            if item.place is Place.OVER and not item.completed:
                reason = f"not started, because {item.label} has to complete first and is {item.state.value}"
                self._leave(reason, after=item.stage)
        left = [item.stage for item in self.sheet.items if item.place is not Place.OVER]
        return min(left, default=0)

    def _leave(self, reason: str, after: int = -1) -> None:
        """Say of runs that wait, of all or of later stages, why they are not started."""
        for item in self.sheet.items:
            if item.stage > after and item.place in (Place.WAITING, Place.IN_USE):
                item.place, item.reason = Place.OVER, reason
                if item.run is not None:
                    hold_back(item.run, reason)
                    with contextlib.suppress(
                        RunError
                    ):  # the folder is gone: the reason stands for it
                        item.outcome = outcome(item.experiment, item.run)

    def _start(self, item: Item, slot: Slot) -> None:
        item.place = Place.RUNNING
        self.display.started(item)
        thread = threading.Thread(target=self._run, args=(item, slot), name=item.label)
        self.threads[id(item)] = thread
        thread.start()

    def _run(self, item: Item, slot: Slot) -> None:
        """In a thread of its own: one run, whatever becomes of it; the last thing it does is to tell."""
        try:
            slot.enter()
            ended = Ended(item, slot, self._attempt(item, slot))
        except RunInUseError:
            ended = Ended(item, slot, in_use=True)
        except QuantexpError as error:
            ended = Ended(item, slot, reason=str(error))
        except BaseException as error:  # noqa: BLE001  (a bug in one run does not take the others away)
            why = f"{type(error).__name__}: {error}"
            ended = Ended(item, slot, reason=why, trace=traceback.format_exc())
        self.events.put(ended)

    def _attempt(self, item: Item, slot: Slot) -> Outcome | None:
        experiment, sheet = item.experiment, self.sheet
        with open_run(
            experiment, self.device, sheet.command, source=sheet.source, since=sheet.started
        ) as (folder, lock):
            item.run = folder.run
            if folder.notice is not None:
                self.events.put(Notice(item, folder.notice))
            if folder.ready:
                watch = self.stop.watch()
                if self.stop.requested:
                    return None
                assert lock is not None
                carry_out(experiment, folder, lock, watch, slot.variables(experiment.launcher))
                self._was_it_on_purpose(item)
            return outcome(experiment, folder.run, folder.skipped, folder.elsewhere)

    def _was_it_on_purpose(self, item: Item) -> None:
        """A run that was ended alone, while its sweep goes on, is not for another process to take over."""
        assert item.run is not None
        if outcome(item.experiment, item.run).state is not State.CANCELLED:
            return
        until = time.monotonic() + SIGNAL_S
        while time.monotonic() < until and not self.stop.requested:
            time.sleep(SIGNAL_S / 10)
        if not self.stop.requested:
            record_cancellation(item.run)

    def _learn(self) -> None:
        """What the threads have to tell; waits a moment for the first of it."""
        wait = True
        while True:
            try:
                event = self.events.get(timeout=TICK_S) if wait else self.events.get_nowait()
            except queue.Empty:
                return
            wait = False
            if isinstance(event, Notice):
                self.display.say(f"{escape(event.item.label)}: {escape(event.text)}")
            else:
                self._ended(event)

    def _ended(self, event: Ended) -> None:
        item = event.item
        self.threads.pop(id(item)).join()
        self.free.append(event.slot)
        if event.in_use:
            item.place = Place.IN_USE
        elif event.outcome is None and event.reason is None:
            item.place = Place.WAITING
        else:
            item.place, item.outcome = Place.OVER, event.outcome
            item.reason = event.reason or ""
            self._write()
        if event.trace:
            self.display.bug(event.trace)
        self.display.ended(item)

    def _write(self) -> None:
        """A sheet that cannot be written now ends no run; it is written once more at the end."""
        try:
            self.sheet.write()
        except RunError as error:
            self.display.say(f"[red]{escape(str(error))}[/]")


def _is_in_use(item: Item) -> bool:
    return item.run is not None and is_locked(item.run)

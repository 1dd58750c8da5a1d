"""Carries one run to one tracker: `python -m quantexp.training.tracking.courier wandb RUN_DIR`.

It reads metrics.jsonl as it grows and status.json until the run has ended, and tells the tracker. What the tracker
could not be told is told later, with growing pauses; only what it has taken counts (`delivery`). So it can be started
again on the same folder at any time, also long after the run: it goes on where the tracker stopped listening. The
worker starts it, and nothing in the worker ever waits for it while the run works.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quantexp.config.load import read
from quantexp.errors import QuantexpError, RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State, read_status
from quantexp.training.tracking.delivery import Delivery, read_delivery, trouble_of, write_delivery
from quantexp.training.tracking.events import TrackedRun, Tracker
from quantexp.training.tracking.metrics_reader import MetricsReader
from quantexp.training.tracking.trackers import BACKENDS, Backend

#: Seconds between two looks at the run folder.
POLL_S = 0.5
#: Seconds before a tracker that failed is asked again: at first, and at most.
PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0
#: Seconds that are left after the worker has ended.
ORPHAN_S = 30.0

_ENDS = (State.COMPLETED, State.FAILED, State.CANCELLED, State.PREEMPTED)


def main(argv: list[str] | None = None) -> int:
    """Carry a run to its end; 0 if the tracker was told everything."""
    parser = argparse.ArgumentParser(
        prog="python -m quantexp.training.tracking.courier", description=__doc__
    )
    parser.add_argument("tracker", choices=[n for n, backend in BACKENDS.items() if backend.REMOTE])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--with-parent", action="store_true", help="end soon after the worker has")
    arguments = parser.parse_args(argv)
    parent = os.getppid() if arguments.with_parent else None
    if parent is not None:
        # A job's end is told to all of its processes; this one still has to tell it to the tracker.
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        courier = Courier(BACKENDS[arguments.tracker], tracked_run(RunDir(arguments.run_dir)))
    except QuantexpError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return courier.run(lambda: parent is None or os.getppid() == parent)


def tracked_run(folder: RunDir) -> TrackedRun:
    """The run of a folder, as trackers know it.

    Raises:
        ConfigError, RunError: it is no run folder.
    """
    status = read_status(folder.status)
    if status is None:
        raise RunError(
            f"{folder.root} has no status.json: it is no run folder, or was never started"
        )
    folder = RunDir(folder.root.absolute())
    return TrackedRun(folder, read(folder.config), folder.attempt, status.created)


def _end_with(parent: int) -> None:
    """Whatever the tracker's library is waiting for: soon after the worker this process ends too."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_S)
    os._exit(1)


class Courier:
    """One run on its way to one tracker."""

    def __init__(self, backend: Backend, run: TrackedRun) -> None:
        self.backend, self.run_ = backend, run
        self.file = run.folder.delivery(backend.NAME)
        self.delivery: Delivery = read_delivery(self.file)
        self.metrics = MetricsReader(run.folder.metrics, self.delivery.offset)
        self.tracker: Tracker | None = None
        self._pause, self._not_before = PAUSE_S, 0.0

    def run(self, worker_lives: Callable[[], bool]) -> int:
        """Tell the tracker everything until the run has ended; 0 if it has taken all of it."""
        if self.delivery.ended and self._end(worker_lives()) is not None:
            return 0
        while (end := self._end(worker_lives())) is None:
            if time.monotonic() >= self._not_before:
                self.tell()
            time.sleep(POLL_S)
        told = self.tell(end)
        self.metrics.close()
        return 0 if told else 1

    def tell(self, end: tuple[State, str] | None = None) -> bool:
        """Tell the tracker what is new, and the end; False, with the reason on record, if it would not take it."""
        try:
            self._deliver(end)
        except Exception as error:  # noqa: BLE001  (a library's own errors; the run goes on whatever they are)
            self._in_trouble(error)
            return False
        return True

    def _deliver(self, end: tuple[State, str] | None) -> None:
        if self.tracker is None:
            self.tracker = self.backend.start(self.run_, self.delivery.id)
            self.delivery.id, self.delivery.where = self.tracker.id, self.tracker.where
            self.delivery.ended = False
            self._keep()
        while points := self.metrics.read():
            self.tracker.log(points)
            self.metrics.accept()
            self.delivery.iteration, self.delivery.offset = (
                points[-1].iteration,
                self.metrics.offset,
            )
            self._keep()
        if end is not None:
            state, reason = end
            self.tracker.end(state, redacted(reason))
            self.delivery.ended = True
        self._pause = PAUSE_S
        if self.delivery.trouble or end is not None:
            self.delivery.trouble = ""
            self._keep()

    def _in_trouble(self, error: Exception) -> None:
        self.delivery.trouble = trouble_of(error)
        whole = redacted(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"{whole}\nasked again in {self._pause:.0f} s\n")
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self._keep()

    def _keep(self) -> None:
        """Put the delivery on record, unless the folder is another attempt's by now."""
        try:
            status = read_status(self.run_.folder.status)
            if status is not None and status.created == self.run_.created:
                write_delivery(self.file, self.delivery)
        except (OSError, RunError) as error:
            sys.stderr.write(f"{self.file} cannot be written: {error}\n")

    def _end(self, worker_lives: bool) -> tuple[State, str] | None:
        """How the run ended, or None while it works."""
        status = None
        try:
            status = read_status(self.run_.folder.status)
        except RunError as error:
            sys.stderr.write(f"{error}\n")
        own = status is None or status.created == self.run_.created
        if status is not None and own and status.state in _ENDS:
            return status.state, status.reason
        if worker_lives and own:
            return None
        return State.FAILED, "the worker ended without a word"


if __name__ == "__main__":
    sys.exit(main())

"""The trackers of a run as its worker holds them. Nothing here raises, and nothing waits while the run works.

What is wrong with a tracker is said once in the worker's log, and stands in status.json. One whose files the worker
writes is left alone after a failure. A remote one has a courier, a process in a session of its own, so that a Ctrl-C in
the terminal does not reach it; at the run's end it has some seconds, and what it could not tell by then it tells when
it is started again.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.training.tracking.delivery import Delivery, read_delivery, trouble_of, write_delivery
from quantexp.training.tracking.events import TrackedRun, Tracker, point
from quantexp.training.tracking.trackers import Backend, asked_for

#: Seconds that couriers have after a run that completed; after one that did not, whose processes may soon be killed;
#: and where the tracker is in trouble.
PATIENCE_S, SHORT_PATIENCE_S, TROUBLED_PATIENCE_S = 30.0, 10.0, 3.0
#: Seconds between two looks at what couriers have put on record.
LOOK_S = 1.0


class Tracking:
    """All trackers of one run, in the process of the rank that leads."""

    def __init__(self, folder: RunDir, experiment: Experiment) -> None:
        self._folder, self._experiment = folder, experiment
        self._deliveries: dict[str, Delivery] = {}
        #: Those that this process writes itself, as long as they work.
        self._trackers: dict[str, Tracker] = {}
        self._couriers: dict[str, subprocess.Popen[bytes]] = {}
        self._said: set[str] = set()
        self._looked = 0.0

    def start(self, created: str) -> None:
        """Begin, for the attempt that was created then."""
        run = TrackedRun(self._folder, self._experiment, self._folder.attempt, created)
        for backend in asked_for(self._experiment.tracking):
            self._deliveries[backend.NAME] = Delivery()
            with self._guarded(backend.NAME):
                if backend.REMOTE:
                    self._couriers[backend.NAME] = self._courier(backend)
                else:
                    self._begin(backend, run)

    def log(self, line: Mapping[str, Any]) -> None:
        """An iteration is over: its line of metrics.jsonl, NaN and Inf not yet replaced."""
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                tracker.log([point(line)])
                self._deliveries[name].iteration = int(line["iteration"])

    def end(self, state: State, reason: str) -> None:
        """The run is over, and its status.json says so."""
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                tracker.end(state, redacted(reason))
                self._deliveries[name].ended = True
        patience_s = PATIENCE_S if state is State.COMPLETED else SHORT_PATIENCE_S
        started = time.monotonic()
        for name, process in self._couriers.items():
            self._wait(name, process, started, patience_s)

    def report(self) -> dict[str, dict[str, Any]]:
        """What status.json says of each tracker: where the run is, its id there, how far it is, what is wrong."""
        if time.monotonic() - self._looked > LOOK_S:
            self._look()
        return {
            name: {
                "where": delivery.where,
                "id": delivery.id,
                "iteration": delivery.iteration,
                "ended": delivery.ended,
                "trouble": delivery.trouble,
            }
            for name, delivery in self._deliveries.items()
        }

    def _begin(self, backend: Backend, run: TrackedRun) -> None:
        tracker = backend.start(run)
        self._trackers[backend.NAME] = tracker
        delivery = self._deliveries[backend.NAME]
        delivery.id, delivery.where = tracker.id, tracker.where

    def _courier(self, backend: Backend) -> subprocess.Popen[bytes]:
        with self._folder.courier_log(backend.NAME).open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "quantexp.training.tracking.courier"),
                    *(backend.NAME, str(self._folder.root), "--with-parent"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """A tracker's failure is its own: put on record, and the run goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises)
            self._trackers.pop(name, None)
            self._deliveries[name].trouble = trouble_of(error)
            self._say(name)

    def _look(self) -> None:
        """Take over what couriers have put on record."""
        self._looked = time.monotonic()
        for name, process in self._couriers.items():
            code = process.poll()  # before the record: the last thing a courier does is to write it
            delivery = read_delivery(self._folder.delivery(name))
            if code and not delivery.trouble:
                log = self._folder.courier_log(name)
                delivery.trouble = f"its process ended with exit code {code}; see {log}"
            self._deliveries[name] = delivery
            self._say(name)

    def _say(self, name: str) -> None:
        trouble = self._deliveries[name].trouble
        if trouble and name not in self._said:
            self._said.add(name)
            sys.stderr.write(f"tracking.{name}: {trouble}; the run goes on\n")

    def _wait(
        self, name: str, process: subprocess.Popen[bytes], started: float, patience_s: float
    ) -> None:
        while process.poll() is None:
            self._look()
            troubled = bool(self._deliveries[name].trouble)
            limit_s = min(patience_s, TROUBLED_PATIENCE_S) if troubled else patience_s
            if time.monotonic() - started > limit_s:
                _kill(process)
                self._give_up(name, limit_s)
                return
            time.sleep(0.1)
        self._look()

    def _give_up(self, name: str, limit_s: float) -> None:
        """Leave on record that not everything was told, and why."""
        file = self._folder.delivery(name)
        delivery = read_delivery(file)
        delivery.trouble = delivery.trouble or f"did not take everything within {limit_s:.0f} s"
        self._deliveries[name] = delivery
        self._say(name)
        with contextlib.suppress(OSError):  # status.json says it too
            write_delivery(file, delivery)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a courier and what its library has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()

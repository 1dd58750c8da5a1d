"""The trackers of a run in its worker. Nothing here raises, and nothing waits while the run works.

A tracker's error goes to status.json, and once to the worker's log. A tracker whose files the worker writes is dropped
after an error. A remote one has a child process (`upload`) in a session of its own, so that Ctrl-C in the terminal does
not reach it. At the run's end the child has some seconds; a later upload sends the rest.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import psutil

from quantexp.runs.curves import CurvesLine
from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.training.log import LOG
from quantexp.training.tracking.events import TrackedRun, Tracker, point
from quantexp.training.tracking.trackers import Backend, enabled
from quantexp.training.tracking.upload import Delivery, error_line

#: Seconds that uploads have after a run that completed; after any other, whose processes may soon be killed; and with a
#: tracker that failed before.
PATIENCE_S, SHORT_PATIENCE_S, TROUBLED_PATIENCE_S = 30.0, 10.0, 3.0
#: Seconds between two reads of the records of uploads.
LOOK_S = 1.0


class Tracking:
    """All trackers of one run, in the process of rank 0."""

    def __init__(self, folder: RunDir, experiment: Experiment) -> None:
        self._folder, self._experiment = folder, experiment
        self._deliveries: dict[str, Delivery] = {}
        #: Trackers that this process writes itself, without those that failed.
        self._trackers: dict[str, Tracker] = {}
        self._uploads: dict[str, subprocess.Popen[bytes]] = {}
        self._reported: set[str] = set()
        self._looked = 0.0

    def start(self, created: str) -> None:
        """Start all trackers for the attempt that was created at this time."""
        run = TrackedRun(self._folder, self._experiment, self._folder.attempt, created)
        for backend in enabled(self._experiment.tracking):
            delivery = self._deliveries[backend.NAME] = Delivery()
            with self._guarded(backend.NAME):
                if backend.REMOTE:
                    self._uploads[backend.NAME] = self._upload(backend)
                else:
                    tracker = self._trackers[backend.NAME] = backend.start(run)
                    delivery.id, delivery.where = tracker.id, tracker.where

    def log(self, line: Mapping[str, Any], curves: CurvesLine | None = None) -> None:
        """Log an iteration: its line of metrics.jsonl with NaN and Inf, and of curves.jsonl."""
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                tracker.log([point(line, curves)])
                self._deliveries[name].iteration = int(line["iteration"])

    def end(self, state: State, reason: str) -> None:
        """End all trackers, after status.json has the run's end."""
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                tracker.end(state, redacted(reason))
                self._deliveries[name].ended = True
        patience_s = PATIENCE_S if state is State.COMPLETED else SHORT_PATIENCE_S
        started = time.monotonic()
        for name, process in self._uploads.items():
            self._wait(name, process, started, patience_s)

    def report(self) -> dict[str, dict[str, Any]]:
        """The deliveries for status.json: address, id, iteration, end and error of each tracker."""
        if time.monotonic() - self._looked > LOOK_S:
            self._look()
        return {name: asdict(delivery) for name, delivery in self._deliveries.items()}

    def _upload(self, backend: Backend) -> subprocess.Popen[bytes]:
        with self._folder.tracker_log(backend.NAME).open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "quantexp.training.tracking.upload"),
                    *(backend.NAME, str(self._folder.root), "--with-parent"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Keep a tracker's error from the run: it is reported, and the tracker is dropped."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises)
            self._trackers.pop(name, None)
            self._deliveries[name].trouble = error_line(error)
            self._report(name)

    def _report(self, name: str) -> None:
        trouble = self._deliveries[name].trouble
        if trouble and name not in self._reported:
            self._reported.add(name)
            LOG.warning("tracking.%s: %s; the run continues", name, trouble)

    def _look(self) -> None:
        """Read the records of the uploads."""
        self._looked = time.monotonic()
        for name, process in self._uploads.items():
            code = process.poll()  # before the record, which an upload writes last
            delivery = Delivery.read(self._folder.delivery(name))
            if code and not delivery.trouble:
                log = self._folder.tracker_log(name)
                delivery.trouble = f"its process ended with exit code {code}; see {log}"
            self._deliveries[name] = delivery
            self._report(name)

    def _wait(
        self, name: str, process: subprocess.Popen[bytes], started: float, patience_s: float
    ) -> None:
        """Wait for an upload; kill it, with the reason in its record, when its time is over."""
        while process.poll() is None:
            self._look()
            delivery = self._deliveries[name]
            limit_s = min(patience_s, TROUBLED_PATIENCE_S) if delivery.trouble else patience_s
            if time.monotonic() - started > limit_s:
                _kill(process)
                # It may have recorded more since the last look.
                delivery = self._deliveries[name] = Delivery.read(self._folder.delivery(name))
                delivery.trouble = delivery.trouble or f"not everything sent within {limit_s:.0f} s"
                self._report(name)
                with contextlib.suppress(OSError):  # status.json has it too
                    delivery.write(self._folder.delivery(name))
                return
            time.sleep(0.1)
        self._look()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill an upload and the processes of its library."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()

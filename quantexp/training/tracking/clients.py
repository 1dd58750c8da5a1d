"""The trackers of a run in rank 0. Nothing here raises, and nothing waits while the run works.

A tracker's error goes to status.json, and once to the rank's log. A tracker whose files the rank writes itself is
dropped after an error. A remote one has a daemon thread (`upload`). The thread begins after the first iteration: to
import W&B or MLflow takes seconds, which would delay the start, and no two threads should import at the same time.
At the run's end the threads have some seconds; a later upload sends the rest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from quantexp.runs.curves import CurvesLine
from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.training.log import LOG
from quantexp.training.tracking.events import TrackedRun, Tracker, point
from quantexp.training.tracking.trackers import enabled
from quantexp.training.tracking.upload import Upload, error_line, record_of

#: Seconds that uploads have after a run that completed; after any other, whose processes may soon be killed; and with a
#: tracker that failed before.
PATIENCE_S, SHORT_PATIENCE_S, TROUBLED_PATIENCE_S = 30.0, 10.0, 3.0


class Tracking:
    """All trackers of one run, in the process of rank 0."""

    def __init__(
        self,
        folder: RunDir,
        experiment: Experiment,
        earlier: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`earlier` is the report of an earlier start of the same attempt."""
        self._folder, self._experiment = folder, experiment
        self._backends = enabled(experiment.tracking)
        self._deliveries = {
            each.NAME: record_of((earlier or {}).get(each.NAME, {})) for each in self._backends
        }
        #: Trackers that this thread calls, without those that failed.
        self._trackers: dict[str, Tracker] = {}
        self._uploads: dict[str, tuple[Upload, threading.Thread]] = {}
        self._reported: set[str] = set()
        #: Whether training's start is over: an iteration is complete, or the run has ended.
        self._has_started = threading.Event()

    def start(self, created: str) -> None:
        """Start all trackers for the attempt that was created at this time."""
        run = TrackedRun(self._folder, self._experiment, self._folder.attempt, created)
        for backend in self._backends:
            name, delivery = backend.NAME, self._deliveries[backend.NAME]
            if backend.REMOTE:
                upload = Upload(backend, run, delivery)
                thread = threading.Thread(
                    target=self._follow, args=[upload], name=name, daemon=True
                )
                self._uploads[name] = upload, thread
                thread.start()
                continue
            with self._guarded(name):
                tracker = self._trackers[name] = backend.start(run)
                delivery["id"], delivery["where"] = tracker.id, tracker.where

    def log(self, line: Mapping[str, Any], curves: CurvesLine | None = None) -> None:
        """Log an iteration: its line of metrics.jsonl, which is written, with NaN and Inf, and of curves.jsonl."""
        self._has_started.set()
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                tracker.log([point(line, curves)])
                self._deliveries[name]["iteration"] = int(line["iteration"])

    def end(self, state: State, reason: str) -> None:
        """End all trackers; a remote one that takes too long is left, with the reason in its record."""
        for name, tracker in list(self._trackers.items()):
            with self._guarded(name):
                tracker.end(state, redacted(reason))
                self._deliveries[name]["ended"] = True
        for upload, _ in self._uploads.values():
            upload.end(state, reason)
        self._has_started.set()
        patience_s = PATIENCE_S if state is State.COMPLETED else SHORT_PATIENCE_S
        started = time.monotonic()
        for upload, thread in self._uploads.values():
            limit_s = TROUBLED_PATIENCE_S if upload.delivery["trouble"] else patience_s
            thread.join(max(0.0, started + limit_s - time.monotonic()))
            if not upload.delivery["ended"] and not upload.delivery["trouble"]:
                upload.delivery["trouble"] = f"not everything sent within {limit_s:.0f} s"
                self._report(upload.name)

    def report(self) -> dict[str, dict[str, Any]]:
        """The deliveries for status.json: address, id, iteration, end and error of each tracker."""
        return {name: dict(delivery) for name, delivery in self._deliveries.items()}

    def _follow(self, upload: Upload) -> None:
        self._has_started.wait()
        upload.follow(lambda: self._report(upload.name))

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Keep a tracker's error from the run: it is reported, and the tracker is dropped."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises)
            self._trackers.pop(name, None)
            self._deliveries[name]["trouble"] = error_line(error)
            self._report(name)

    def _report(self, name: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            LOG.warning(
                "tracking.%s: %s; the run continues", name, self._deliveries[name]["trouble"]
            )

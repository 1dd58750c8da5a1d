"""Sends one run to one tracker that may wait for a network, from metrics.jsonl and curves.jsonl.

The files are the queue: a tracker that is slow or away costs the run no memory, and misses nothing. Rank 0 sends from a
thread while the run works (`clients`). `python -m quantexp.training.tracking.upload wandb RUN_DIR` sends what the
tracker has not received of a run that has ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantexp.config.load import read
from quantexp.errors import QuantexpError, RunError
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted
from quantexp.runs.status import Delivered, State, read_status, write_status
from quantexp.training.tracking.events import Point, PointReader, TrackedRun, Tracker
from quantexp.training.tracking.trackers import BACKENDS, Backend

#: Seconds between two looks at metrics.jsonl; before a failed request is repeated, at first and at most.
LOOK_S, PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0, 600.0
#: Characters of an error message in the record.
LONGEST_ERROR = 240

_ENDS = (State.COMPLETED, State.FAILED, State.CANCELLED, State.PREEMPTED)


def error_line(error: Exception) -> str:
    """An error in one line, without secrets; a long one is cut."""
    first = (str(error).strip().splitlines() or [""])[0]
    text = str(redacted(f"{type(error).__name__}: {first}"))
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 3]}..."


def record_of(earlier: Mapping[str, Any]) -> Delivered:
    """The record in status.json of an upload that continues an earlier one of the same attempt, if there was one."""
    return Delivered(
        where=earlier.get("where", ""),
        id=earlier.get("id"),
        iteration=earlier.get("iteration", 0),
        ended=False,
        trouble="",
    )


class Upload:
    """The upload of one run to one tracker; `delivery` is its record in status.json."""

    def __init__(self, backend: Backend, run: TrackedRun, delivery: Delivered) -> None:
        """`delivery` has the id and the last iteration of an earlier upload, if there was one."""
        self.name, self.delivery = backend.NAME, delivery
        self._backend, self._run = backend, run
        self._tracker: Tracker | None = None
        self._points = PointReader(run.folder)
        self._unsent: list[Point] = []
        #: The end of the run, and the event that it has come.
        self._end: tuple[State, str] | None = None
        self._has_ended = threading.Event()

    def follow(self, on_error: Callable[[], None]) -> None:
        """Send what is new until the run has ended; a failed request is repeated after a growing pause."""
        pause_s = PAUSE_S
        while True:
            end = self._end
            if is_sent := self.send(end):
                pause_s = PAUSE_S
            else:
                on_error()
            if end is not None:
                return
            self._has_ended.wait(LOOK_S if is_sent else pause_s)
            if not is_sent:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def end(self, state: State, reason: str) -> None:
        """Let `follow` send the rest and the end, and return."""
        self._end = state, reason
        self._has_ended.set()

    def send(self, end: tuple[State, str] | None = None) -> bool:
        """Send what is new, and the end; False if the tracker failed, with the error in the record."""
        try:
            self._send(end)
        except Exception as error:  # noqa: BLE001  (a library's own errors; the run continues whatever they are)
            self.delivery["trouble"] = error_line(error)
            return False
        self.delivery["trouble"] = ""
        return True

    def _send(self, end: tuple[State, str] | None) -> None:
        delivery = self.delivery
        if self._tracker is None:
            self._tracker = self._backend.start(self._run, delivery["id"])
            delivery["id"], delivery["where"] = self._tracker.id, self._tracker.where
        while points := self._unsent or self._points.read():
            self._unsent = points
            # A run that goes on from a checkpoint repeats iterations that were sent, with the same numbers.
            if new := [point for point in points if point.iteration > delivery["iteration"]]:
                self._tracker.log(new)
                delivery["iteration"] = new[-1].iteration
            self._unsent = []
        if end is not None:
            state, reason = end
            self._tracker.end(state, redacted(reason))
            delivery["ended"] = True
            self._points.close()


def main(argv: list[str] | None = None) -> int:
    """Send the rest of a run that has ended; 0 if the tracker has everything."""
    parser = argparse.ArgumentParser(
        prog="python -m quantexp.training.tracking.upload", description=__doc__
    )
    parser.add_argument("tracker", choices=[n for n, backend in BACKENDS.items() if backend.REMOTE])
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args(argv)
    try:
        trouble = _send_rest(arguments.tracker, RunDir(arguments.run_dir.absolute()))
    except QuantexpError as error:
        trouble = str(error)
    if trouble:
        sys.stderr.write(f"{trouble}\n")
    return 1 if trouble else 0


def _send_rest(tracker: str, folder: RunDir) -> str:
    """Send what a tracker has not received of an ended run, and record it in status.json; returns the tracker's error.

    Raises:
        QuantexpError: it is no run folder, or another process executes the run.
    """
    status = read_status(folder.status)
    if status is None:
        raise RunError(
            f"{folder.root} has no status.json: it is not a run folder, or its run never started"
        )
    lock = take_lock(folder)
    try:
        status = read_status(folder.status) or status
        earlier = status.tracking.get(tracker, {})
        if earlier.get("ended"):
            return ""
        delivery = record_of(earlier)
        run = TrackedRun(folder, read(folder.config), folder.attempt, status.created)
        end = status.state, status.reason
        if status.state not in _ENDS:  # killed, and nobody has recorded it
            end = State.FAILED, "the worker ended without recording a result"
        Upload(BACKENDS[tracker], run, delivery).send(end)
        status.tracking[tracker] = dict(delivery)
        write_status(folder.status, status)
        return delivery["trouble"]
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())

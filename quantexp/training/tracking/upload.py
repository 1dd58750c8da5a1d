"""Uploads one run to one tracker: `python -m quantexp.training.tracking.upload wandb RUN_DIR`.

The worker starts this process for each remote tracker and never waits for it while the run works. The process follows
metrics.jsonl and curves.jsonl, and status.json until the run has ended. It repeats a failed request after a growing
pause. Its record in the run folder (`Delivery`) counts only what the tracker has accepted, so the same command
continues an upload at any time, also long after the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from quantexp.config.load import read
from quantexp.errors import QuantexpError, RunError, UnreadableError
from quantexp.reading.json_files import require_json
from quantexp.runs.curves import CurveLines
from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State, read_status, write_json
from quantexp.training.log import LOG, log_to_stderr
from quantexp.training.tracking.events import TrackedRun, Tracker, read_points
from quantexp.training.tracking.trackers import BACKENDS, Backend

#: Seconds between two looks at the run folder.
POLL_S = 0.5
#: Seconds before a failed request is repeated: at first, and at most.
PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0
#: Seconds that this process may continue after the worker has ended.
ORPHAN_S = 30.0
#: Characters of an error message in the record.
LONGEST_ERROR = 240

_ENDS = (State.COMPLETED, State.FAILED, State.CANCELLED, State.PREEMPTED)


@dataclass
class Delivery:
    """What a tracker has received of one attempt at a run: a file that the upload writes and the worker reads."""

    #: Where a person finds the run, once the tracker has it.
    where: str = ""
    #: The tracker's own id of the run.
    id: str | None = None
    #: The last iteration that it has.
    iteration: int = 0
    #: Whether it has the run's end.
    ended: bool = False
    #: The current error in one line; empty if there is none.
    trouble: str = ""

    @classmethod
    def read(cls, file: Path) -> Delivery:
        """The record in a file; a new one if it is missing or unreadable."""
        try:
            content = require_json(file, dict[str, Any])
            return cls(**{e.name: content[e.name] for e in fields(cls) if e.name in content})
        except UnreadableError:
            return cls()

    def write(self, file: Path) -> None:
        """Replace the file."""
        write_json(file, asdict(self))


def error_line(error: Exception) -> str:
    """An error in one line, without secrets; a long one is cut."""
    first = (str(error).strip().splitlines() or [""])[0]
    text = str(redacted(f"{type(error).__name__}: {first}"))
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 3]}..."


class Upload:
    """The upload of one run to one tracker."""

    def __init__(self, backend: Backend, run: TrackedRun) -> None:
        self.backend, self.run = backend, run
        self.file = run.folder.delivery(backend.NAME)
        self.delivery = Delivery.read(self.file)
        self._tracker: Tracker | None = None
        #: Stays open, so that it is read to its end even if another attempt moves it.
        self._metrics: BinaryIO | None = None
        self._curves: CurveLines | None = None
        #: Bytes of metrics.jsonl that were read.
        self._offset = 0
        self._pause_s, self._not_before = PAUSE_S, 0.0

    def follow(self, is_worker_alive: Callable[[], bool]) -> bool:
        """Upload until the run has ended; returns whether the tracker has everything."""
        if self.delivery.ended and self._end(is_worker_alive()) is not None:
            return True
        while (end := self._end(is_worker_alive())) is None:
            if time.monotonic() >= self._not_before:
                self.send()
            time.sleep(POLL_S)
        try:
            return self.send(end)
        finally:
            self.close()

    def send(self, end: tuple[State, str] | None = None) -> bool:
        """Send what is new, and the end; False if the tracker failed, with the error in the record."""
        try:
            self._send(end)
        except Exception as error:  # noqa: BLE001  (a library's own errors; the run continues whatever they are)
            self.delivery.trouble = error_line(error)
            whole = redacted(f"{type(error).__name__}: {error}")
            LOG.warning("%s\nnext attempt in %.0f s", whole, self._pause_s)
            self._not_before = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._write()
            return False
        return True

    def close(self) -> None:
        """Close metrics.jsonl and curves.jsonl."""
        for file in (self._metrics, self._curves):
            if file is not None:
                file.close()

    def _send(self, end: tuple[State, str] | None) -> None:
        delivery = self.delivery
        if self._tracker is None:
            self._tracker = self.backend.start(self.run, delivery.id)
            delivery.id, delivery.where = self._tracker.id, self._tracker.where
            delivery.ended = False
            self._write()
        if self._metrics is None and self.run.folder.metrics.exists():
            self._metrics = self.run.folder.metrics.open("rb")
            self._curves = CurveLines(self.run.folder)
        while self._metrics is not None:
            points, offset = read_points(self._metrics, self._offset, self._curves)
            if offset == self._offset:
                break
            # A run that goes on from a checkpoint repeats iterations that were sent, with the same numbers.
            new = [point for point in points if point.iteration > delivery.iteration]
            if new:
                self._tracker.log(new)
                delivery.iteration = new[-1].iteration
                self._write()
            self._offset = offset
        if end is not None:
            state, reason = end
            self._tracker.end(state, redacted(reason))
            delivery.ended = True
        self._pause_s = PAUSE_S
        if delivery.trouble or end is not None:
            delivery.trouble = ""
            self._write()

    def _write(self) -> None:
        """Write the record, unless the folder belongs to another attempt by now."""
        try:
            status = read_status(self.run.folder.status)
            if status is not None and status.created == self.run.created:
                self.delivery.write(self.file)
        except (OSError, RunError) as error:
            LOG.warning("%s cannot be written: %s", self.file, error)

    def _end(self, is_worker_alive: bool) -> tuple[State, str] | None:
        """The state and reason with which the run has ended; None while it works."""
        status = None
        try:
            status = read_status(self.run.folder.status)
        except RunError as error:
            LOG.warning(error)
        is_ours = status is None or status.created == self.run.created
        if status is not None and is_ours and status.state in _ENDS:
            return status.state, status.reason
        if is_worker_alive and is_ours:
            return None
        return State.FAILED, "the worker ended without recording a result"


def tracked_run(folder: RunDir) -> TrackedRun:
    """The run of a folder.

    Raises:
        ConfigError, RunError: it is not a run folder.
    """
    status = read_status(folder.status)
    if status is None:
        raise RunError(
            f"{folder.root} has no status.json: it is not a run folder, or its run never started"
        )
    folder = RunDir(folder.root.absolute())
    return TrackedRun(folder, read(folder.config), folder.attempt, status.created)


def main(argv: list[str] | None = None) -> int:
    """Upload a run until it has ended; 0 if the tracker has everything."""
    parser = argparse.ArgumentParser(
        prog="python -m quantexp.training.tracking.upload", description=__doc__
    )
    parser.add_argument("tracker", choices=[n for n, backend in BACKENDS.items() if backend.REMOTE])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--with-parent", action="store_true", help="end soon after the worker has")
    arguments = parser.parse_args(argv)
    parent = os.getppid() if arguments.with_parent else None
    if parent is not None:
        # SLURM signals the end of a job to all of its processes; this one still has to report it.
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        upload = Upload(BACKENDS[arguments.tracker], tracked_run(RunDir(arguments.run_dir)))
    except QuantexpError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    with log_to_stderr(arguments.tracker):
        is_sent = upload.follow(lambda: parent is None or os.getppid() == parent)
    return 0 if is_sent else 1


def _end_with(parent: int) -> None:
    """End this process soon after the worker, whatever the tracker's library waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

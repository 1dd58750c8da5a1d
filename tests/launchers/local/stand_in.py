"""Stand-ins for the code that runs an attempt, and the status that they write into a run folder."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

from rich.console import Console

from quantexp.launch.attempt import Opened
from quantexp.runs.paths import RunDir
from quantexp.runs.status import INTERRUPTED, State, now, read_status, write_status
from quantexp.schema import Experiment


def put_status(run: RunDir, state: State, reason: str = "") -> None:
    """Write the status of a worker that ended in this state, or still runs."""
    status = read_status(run.status)
    assert status is not None
    status.state, status.reason, status.iteration = state, reason, status.iterations
    status.started = status.started or now()
    if state is not State.RUNNING:
        status.finished = now()
    write_status(run.status, status)


def output_of(console: Console) -> str:
    """The output of a console that writes into a string."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def until_interrupted(run: RunDir, on_poll: Callable[[], None]) -> None:
    try:
        while True:
            on_poll()
            time.sleep(0.01)
    except KeyboardInterrupt:
        put_status(run, State.CANCELLED, INTERRUPTED)


def is_interrupted(run: RunDir, on_poll: Callable[[], None]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    until_interrupted(run, on_poll)


class Workers:
    """Stands in for running an attempt: a run completes after a moment, unless `does` has its seed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: Seeds in the order of their starts, and those that run now.
        self.started: list[int] = []
        self.running: set[int] = set()
        #: The largest number of simultaneous runs.
        self.most = 0
        self.variables: list[Mapping[str, str]] = []
        #: What a seed does instead of completing.
        self.does: dict[int, Callable[[RunDir, Callable[[], None]], None]] = {}
        self.seconds = 0.05

    def __call__(
        self,
        experiment: Experiment,
        folder: Opened,
        lock: int,
        on_poll: Callable[[], None],
        variables: Mapping[str, str],
        warm: object = None,
    ) -> None:
        seed = experiment.training.seed
        with self.lock:
            self.started.append(seed)
            self.running.add(seed)
            self.most = max(self.most, len(self.running))
            self.variables.append(variables)
        put_status(folder.run, State.RUNNING)
        try:
            if seed in self.does:
                self.does[seed](folder.run, on_poll)
            else:
                time.sleep(self.seconds)
                put_status(folder.run, State.COMPLETED)
        finally:
            with self.lock:
                self.running.discard(seed)

"""TensorBoard: event files in the run folder's tensorboard/, written by the worker itself after every iteration.

Each curve has the iteration as its step; the loss is there a second time by tokens (`train/loss_by_tokens`). The
resolved configuration and the run's end are on the Text page, what distinguishes runs on the HParams page. A
TensorBoard that is open shows every iteration as it comes. A worker that starts again in the same attempt begins a new
file, which takes back the iterations that it repeats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.events import LOSS, TOKENS_SEEN, Point, TrackedRun, hyperparameters

NAME = "tensorboard"
REMOTE = False

LOSS_BY_TOKENS = "train/loss_by_tokens"


def enabled(tracking: TrackingConfig) -> bool:
    """Whether it is asked for."""
    return tracking.tensorboard


def destination(tracking: TrackingConfig, run: RunDir) -> str:
    """What is written where, in words."""
    return str(run.tensorboard)


def start(run: TrackedRun, earlier: str | None = None) -> TensorboardTracker:
    """A new event file, with the configuration in it.

    Raises:
        OSError: it cannot be written.
    """
    return TensorboardTracker(run)


class TensorboardTracker:
    """One process's event file."""

    def __init__(self, run: TrackedRun) -> None:
        from quantexp.training.tracking.event_file import EventFile

        self.id, self.where = run.name, NAME
        folder = run.folder.tensorboard
        folder.mkdir(exist_ok=True)
        self._repeats = any(folder.iterdir())
        config = run.folder.config.read_text()
        self._file = EventFile(folder)
        now = time.time()
        self._file.text(now, "config", f"```yaml\n{config}```")
        self._file.session_start(now, hyperparameters(run.experiment))

    def log(self, points: Sequence[Point]) -> None:
        """One event for each point, and one for its loss by tokens."""
        for point in points:
            if self._repeats:
                self._file.take_back(point.time_s, point.iteration)
                self._repeats = False
            self._file.scalars(point.time_s, point.iteration, point.scalars)
            by_tokens = {LOSS_BY_TOKENS: point.scalars[LOSS]}
            self._file.scalars(point.time_s, int(point.scalars[TOKENS_SEEN]), by_tokens)

    def end(self, state: State, reason: str) -> None:
        """The state on the Text page and the HParams page; the file is closed."""
        now = time.time()
        try:
            self._file.text(now, "state", f"{state.value}: {reason}" if reason else state.value)
            self._file.session_end(now, state is State.COMPLETED)
        finally:
            self._file.close()

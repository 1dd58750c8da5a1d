"""TensorBoard: event files in the run folder's tensorboard/, written by rank 0 itself after every iteration.

The step of a curve is the iteration; `train/loss_by_tokens` is the loss with the tokens as its step. The resolved
configuration and the run's end are on the Text page, the hyperparameters on the HParams page. A run that goes on from a
checkpoint replaces the file by a new one, which begins with the iterations in metrics.jsonl: each is there once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.events import (
    LOSS,
    TOKENS_SEEN,
    Point,
    PointReader,
    TrackedRun,
    hyperparameters,
)

NAME = "tensorboard"
REMOTE = False

LOSS_BY_TOKENS = "train/loss_by_tokens"


def destination(tracking: TrackingConfig, run: RunDir) -> str:
    """The folder of the event files."""
    return str(run.tensorboard)


class TensorboardTracker:
    """The event file of one process, which begins with the configuration.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, run: TrackedRun, earlier: str | None = None) -> None:
        from quantexp.training.tracking.event_file import PREFIX, EventFile

        self.id, self.where = run.name, NAME
        folder = run.folder.tensorboard
        folder.mkdir(exist_ok=True)
        for earlier_file in folder.glob(f"{PREFIX}*"):
            earlier_file.unlink()
        config = run.folder.config.read_text()
        self._file = EventFile(folder)
        now = time.time()
        self._file.text(now, "config", f"```yaml\n{config}```")
        self._file.session_start(now, hyperparameters(run.experiment))
        with closing(PointReader(run.folder)) as reader:
            while points := reader.read():
                self.log(points)

    def log(self, points: Sequence[Point]) -> None:
        """Write an event for each point, and one for its loss by tokens."""
        for point in points:
            self._file.scalars(point.time_s, point.iteration, point.scalars)
            if point.histograms:
                self._file.histograms(point.time_s, point.iteration, point.histograms)
            by_tokens = {LOSS_BY_TOKENS: point.scalars[LOSS]}
            self._file.scalars(point.time_s, int(point.scalars[TOKENS_SEEN]), by_tokens)

    def end(self, state: State, reason: str) -> None:
        """Write the state to the Text page and the HParams page, and close the file."""
        now = time.time()
        try:
            self._file.text(now, "state", f"{state.value}: {reason}" if reason else state.value)
            self._file.session_end(now, state is State.COMPLETED)
        finally:
            self._file.close()


start = TensorboardTracker

"""What a run is asked to do between two iterations: save a checkpoint, or save one and end.

A signal, the time limit of a job and the clock ask. Ranks are asked at different moments, so the training loop takes
the largest request of all (`quantexp.training.megatron.trainer`). A run without a training state to go on from is not
asked: a signal ends it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

from quantexp.schema import CheckpointConfig

#: A job's checkpoint begins so many seconds before the time limit, besides what an iteration and a save take.
SPARE_S = 10.0
#: How many times as long as the last one the next save may take.
_SLOWER = 1.5


class Request(IntEnum):
    """What is done after an iteration; the larger one includes the smaller."""

    NONE = 0
    SAVE = 1
    #: Save, and end the run.
    END = 2


def may_be_asked(checkpoint: CheckpointConfig) -> bool:
    """Whether a run's ranks have to agree on requests at all."""
    return checkpoint.optimizer or checkpoint.every_min is not None


class Requests:
    """The requests that one rank has received."""

    def __init__(
        self, checkpoint: CheckpointConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._checkpoint, self._clock = checkpoint, clock
        #: A signal asked for the end.
        self.ends = False
        #: The end comes from the time limit of the job.
        self.is_at_limit = False
        self._limit: float | None = None
        self._saved = self._began = clock()
        self._iteration_s = 0.0

    @property
    def is_possible(self) -> bool:
        """Whether a run can go on from a checkpoint at all."""
        return self._checkpoint.optimizer

    def warn(self, seconds: float) -> None:
        """The scheduler ends the job in so many seconds."""
        self._limit = self._clock() + seconds

    def after_iteration(self, save_s: float) -> Request:
        """The request after an iteration.

        Args:
            save_s: seconds that the last save took, until its checkpoint was whole.
        """
        now = self._clock()
        self._iteration_s, self._began = now - self._began, now
        if self._limit is not None and self.is_possible:
            needed = self._iteration_s + _SLOWER * save_s + SPARE_S
            self.is_at_limit = now + needed > self._limit
        if self.ends or self.is_at_limit:
            return Request.END
        every = self._checkpoint.every_min
        is_due = every is not None and now - self._saved >= 60 * every
        return Request.SAVE if is_due else Request.NONE

    def saved(self) -> None:
        """A checkpoint was saved."""
        self._saved = self._clock()

"""What a run is asked to do between two iterations: save a checkpoint, or save one and end.

Requests come from a signal, the time limit of a job and the clock. Ranks receive them at different moments, so all do
what the largest request of all ranks says. A run without a training state to go on from receives none: a signal ends it
at once.
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
    #: Save, and end the run, because of the time limit of its job.
    END_AT_LIMIT = 2
    #: The same, because of a signal.
    END = 3

    @property
    def ends(self) -> bool:
        """Whether the run ends."""
        return self >= Request.END_AT_LIMIT


class Requests:
    """The requests that one rank has received."""

    def __init__(
        self, checkpoint: CheckpointConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._checkpoint, self._clock = checkpoint, clock
        #: A signal asked for the end.
        self.ends = False
        #: A signal asked for a dossier.
        self.dossier = False
        #: What the ranks agreed on after the last iteration.
        self.agreed = Request.NONE
        self._limit: float | None = None
        self._saved = self._began = clock()

    @property
    def is_possible(self) -> bool:
        """Whether a run can go on from a checkpoint at all."""
        return self._checkpoint.optimizer

    @property
    def may_come(self) -> bool:
        """Whether the ranks have to agree on requests at all."""
        return self.is_possible or self._checkpoint.every_min is not None

    def warn(self, seconds: float) -> None:
        """The scheduler ends the job in so many seconds."""
        self._limit = self._clock() + seconds

    def after_iteration(self, save_s: float) -> Request:
        """The request of this rank after an iteration.

        Args:
            save_s: seconds that the last save took, until its checkpoint was whole.
        """
        now = self._clock()
        iteration_s, self._began = now - self._began, now
        if self.ends:
            return Request.END
        if self._limit is not None and self.is_possible:
            needed = iteration_s + _SLOWER * save_s + SPARE_S
            if now + needed > self._limit:
                return Request.END_AT_LIMIT
        every = self._checkpoint.every_min
        is_due = every is not None and now - self._saved >= 60 * every
        return Request.SAVE if is_due else Request.NONE

    def saved(self) -> None:
        """A checkpoint was saved."""
        self._saved = self._clock()

"""What the parts of one rank share: the run, its experiment, the rank, and the status that they tell.

status.json is true from the first moment to the last; of several ranks, rank 0 writes it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quantexp.runs.fencing import require_ours
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.runs.status import Phase, Status, now, read_status, write_status
from quantexp.schema import Experiment
from quantexp.training.log import LOG
from quantexp.training.tracking.clients import Tracking

if TYPE_CHECKING:
    from quantexp.capture.record.recorder import Progress

#: Phases that have a line in the log when they begin; iterations have lines of their own.
_LOGGED = (
    Phase.IMPORTING,
    Phase.READING_DATA,
    Phase.BUILDING,
    Phase.SAVING,
    Phase.WRITING,
    Phase.DRAWING,
)
#: Seconds between two updates of status.json while tensors are captured.
STATUS_INTERVAL_S = 0.2


class RunContext:
    """A run as one of its ranks sees it."""

    def __init__(
        self,
        run: RunDir,
        experiment: Experiment,
        rank: Rank | None = None,
        *,
        in_job: bool = False,
    ) -> None:
        self.run, self.experiment, self.rank = run, experiment, rank or Rank()
        self.in_job = in_job
        self.status = read_status(run.status) or Status(created=now())
        self.tracking = Tracking(run, experiment) if self.rank.leads else None
        #: A signal asked for the end; what it interrupted may have turned it into another error, or dropped it.
        self.interrupted = False
        self._written = 0.0

    def tell(self, phase: Phase) -> None:
        """Say what the run does now."""
        if phase is not self.status.phase:
            self.status.phase, self.status.phase_since = phase, now()
            if self.rank.leads and phase in _LOGGED:
                LOG.info(phase.value)
        self.write_status()

    def at(self, phase: Phase, iteration: int, micro_batch: int) -> None:
        """Say which micro-batch, from 1, of which iteration begins now, and what is done with it."""
        status = self.status
        place = (phase, iteration, micro_batch)
        if place == (status.phase, status.current_iteration, status.micro_batch):
            return
        is_new = phase is not status.phase
        status.phase, status.current_iteration, status.micro_batch = place
        status.phase_since = now()
        if is_new:
            self.write_status()
        else:
            self._write_status_seldom()

    def captured(self, progress: Progress) -> None:
        """Say how many tensors were captured or written."""
        self.status.capture = dict(vars(progress))
        self._write_status_seldom()

    def write_status(self) -> None:
        """Write status.json, with the trackers' state."""
        if not self.rank.leads:
            return
        if self.in_job:
            require_ours(self.run)
        if self.tracking is not None:
            self.status.tracking = self.tracking.report()
        write_status(self.run.status, self.status)
        self._written = time.monotonic()

    def _write_status_seldom(self) -> None:
        if time.monotonic() - self._written > STATUS_INTERVAL_S:
            self.write_status()

"""The state that the parts of one rank share: the run, its experiment, the rank, and the run status.

status.json is current from the start of the process to its end; rank 0 writes it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quantexp.config.start_point import StartPoint
from quantexp.runs.fencing import require_ours
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.runs.status import Phase, Status, now, read_status, write_status
from quantexp.schema import Experiment
from quantexp.training.log import LOG
from quantexp.training.requests import Requests
from quantexp.training.tracking.clients import Tracking

if TYPE_CHECKING:
    from quantexp.capture.record.progress import Progress

#: Phases whose start is logged; each iteration has its own line.
_LOGGED = (
    Phase.IMPORTING,
    Phase.READING_DATA,
    Phase.BUILDING,
    Phase.TASKS,
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
        goes_on_from = self.status.goes_on_from
        #: The run's own checkpoint that this start goes on from; None if it begins at its first iteration.
        self.start = None if goes_on_from is None else StartPoint(run, goes_on_from)
        self.tracking = Tracking(run, experiment, self.status.tracking) if self.rank.leads else None
        #: Whether a signal requested the end; the interrupted code may replace or drop the signal's exception.
        self.interrupted = False
        self.requests = Requests(experiment.checkpoint)
        #: Whether the training loop runs, which serves requests.
        self.is_training = False
        self._written = 0.0

    def require_going(self) -> None:
        """Stop here if a signal or a request ends the run.

        Raises:
            KeyboardInterrupt: it is to end.
        """
        if self.interrupted or self.requests.ends:
            raise KeyboardInterrupt

    def set_phase(self, phase: Phase) -> None:
        """Record the current activity of the run."""
        if phase is not self.status.phase:
            self.status.phase, self.status.phase_since = phase, now()
            if self.rank.leads and phase in _LOGGED:
                LOG.info(phase.value)
        self.write_status()

    def set_micro_batch(self, phase: Phase, iteration: int, micro_batch: int) -> None:
        """Record the micro-batch (from 1) that begins, its iteration, and the activity."""
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
            self._write_status_at_intervals()

    def set_captured(self, progress: Progress) -> None:
        """Record the number of captured and written tensors."""
        self.status.capture = dict(vars(progress))
        self._write_status_at_intervals()

    def write_status(self) -> None:
        """Write status.json, with the trackers' state."""
        if not self.rank.leads:
            return
        require_ours(self.run)
        if self.tracking is not None:
            self.status.tracking = self.tracking.report()
        write_status(self.run.status, self.status)
        self._written = time.monotonic()

    def _write_status_at_intervals(self) -> None:
        if time.monotonic() - self._written > STATUS_INTERVAL_S:
            self.write_status()

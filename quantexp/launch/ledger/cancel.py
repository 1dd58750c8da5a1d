"""Cancels the pending and running runs of a scope: jobs by scancel, local runs by SIGTERM to their worker.

There is no confirmation prompt. A pending local run is marked as cancelled, so that its sweep skips it. A process
receives a signal only if it holds the run's lock; processes on other machines or of other users are left alone and
reported. A run that ends by itself first keeps its own outcome.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from quantexp.errors import RunError
from quantexp.launch.ledger import scheduler
from quantexp.launch.ledger.assigned import has_recorded_end
from quantexp.launch.ledger.owner import workers
from quantexp.launch.ledger.settle import settle
from quantexp.launch.ledger.standing import Standing, standings
from quantexp.runs.lock import is_locked
from quantexp.runs.status import State

#: Seconds to wait for a cancelled run to end.
PATIENCE_S = 40.0
#: Seconds to wait for the process of a starting run to appear.
APPEARANCE_S = 5.0
#: Seconds between two polls.
POLL_S = 0.5
#: The reason in a cancelled run's status.
REASON = "cancelled by quantexp cancel"


@dataclass(frozen=True)
class Cancelled:
    """The result of cancelling one run."""

    run: str
    #: What was cancelled, or why it could not be.
    words: str
    done: bool


def cancel(current: Sequence[Standing]) -> list[Cancelled]:
    """Cancel pending and running runs, wait for their end, record it, and return the result for each."""
    chosen = [s for s in current if s.alive or s.state is State.PENDING]
    cancellation = _Cancellation()
    cancellation.cancel_jobs([s for s in chosen if _is_submitted(s)])
    cancellation.wait([s for s in chosen if s.run.root not in cancellation.refused])
    return [cancellation.outcome(s) for s in chosen]


def _is_submitted(standing: Standing) -> bool:
    return standing.status.submission is not None or standing.status.job_id is not None


@dataclass
class _Cancellation:
    """A cancellation in progress; keys are the run folders."""

    #: Why a run could not be cancelled.
    refused: dict[Path, str] = field(default_factory=dict)
    #: Runs whose job or process received a signal.
    signalled: set[Path] = field(default_factory=set)
    #: The standings at the last poll.
    after: dict[Path, Standing] = field(default_factory=dict)

    def cancel_jobs(self, submitted: Sequence[Standing]) -> None:
        """Cancel all jobs in one call."""
        self.refused |= {
            standing.run.root: standing.note or f"{standing.where}; try again"
            for standing in submitted
            if standing.job is None and standing.alive
        }
        ids = {
            standing.run.root: standing.job.id for standing in submitted if standing.job is not None
        }
        try:
            scheduler.cancel(list(ids.values()))
        except RunError as error:
            self.refused |= dict.fromkeys(ids, str(error))
        self.signalled |= set(ids) - set(self.refused)

    def wait(self, chosen: Sequence[Standing]) -> None:
        """Wait until all runs have ended or the time is up; signal local runs as soon as their process appears."""
        start = time.monotonic()
        runs = [standing.run for standing in chosen]
        while True:
            current = standings(runs)
            self.after = {standing.run.root: standing for standing in current}
            live = [standing for standing in current if standing.alive or is_locked(standing.run)]
            self._signal_workers([standing for standing in live if not _is_submitted(standing)])
            waited_s = time.monotonic() - start
            if not any(waited_s < self._patience_s(standing) for standing in live):
                return
            time.sleep(POLL_S)

    def _patience_s(self, standing: Standing) -> float:
        return PATIENCE_S if standing.run.root in self.signalled else APPEARANCE_S

    def _signal_workers(self, local_runs: Sequence[Standing]) -> None:
        for standing in local_runs:
            if standing.state is State.PENDING and not is_locked(standing.run):
                self.after[standing.run.root] = _mark(standing)
        processes = workers([s.run.lock for s in local_runs if s.run.root not in self.signalled])
        for standing in local_runs:
            if standing.run.lock in processes:
                try:
                    processes[standing.run.lock].terminate()
                except psutil.NoSuchProcess:
                    pass
                except psutil.AccessDenied:
                    continue
                self.signalled.add(standing.run.root)

    def outcome(self, before: Standing) -> Cancelled:
        """The result for one run; records the end of a run that did not record it."""
        name, root = before.run.root.name, before.run.root
        if root in self.refused:
            return Cancelled(name, self.refused[root], False)
        after = self.after[root]
        if after.alive or is_locked(after.run):
            why = "signalled, but still running"
            if root not in self.signalled:
                why = "not a process of yours on this machine; cancel it where it runs, as the user who started it"
            return Cancelled(name, f"{before.where}: {why}", False)
        if not has_recorded_end(after.status):
            after = _mark(after)  # so that no other process takes it over
        where = before.where or "not started yet"
        if after.state is State.CANCELLED:
            return Cancelled(name, where, True)
        return Cancelled(name, f"{where}: {after.state} by itself", True)


def _mark(standing: Standing) -> Standing:
    """Record a run as cancelled, unless another process holds its lock."""
    return settle(replace(standing, state=State.CANCELLED, alive=False, reason=REASON, sure=True))

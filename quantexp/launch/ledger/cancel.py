"""Ends the pending and running runs of a scope: jobs by scancel, local runs by a SIGTERM to their worker.

Nothing is asked. A local run that waits for its turn is marked, so that its sweep passes it over. A process is
signalled only where it is seen to hold the run's lock; what is on another machine, or belongs to another user, is left
and named. What ended by itself before it was reached keeps its own end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from quantexp.errors import RunError
from quantexp.launch.ledger import scheduler
from quantexp.launch.ledger.assigned import has_told
from quantexp.launch.ledger.owner import workers
from quantexp.launch.ledger.settle import settle
from quantexp.launch.ledger.standing import Standing, standings
from quantexp.runs.lock import is_locked
from quantexp.runs.status import State

#: Seconds that what was asked to end may take before it is left to itself.
PATIENCE_S = 40.0
#: Seconds in which the process of a run that just starts comes to be seen.
SEEN_S = 5.0
#: Seconds between two looks at it.
POLL_S = 0.5
#: What a cancelled run's status says.
REASON = "cancelled by quantexp cancel"


@dataclass(frozen=True)
class Cancelled:
    """What became of one run that waited or ran."""

    run: str
    #: What was ended, or why it could not be.
    words: str
    done: bool


def cancel(found: Sequence[Standing]) -> list[Cancelled]:
    """End what waits or runs, wait until it has ended, write that down, and say what became of each."""
    chosen = [each for each in found if each.alive or each.state is State.PENDING]
    ending = _Ending()
    ending.ask_scheduler([each for each in chosen if _is_submitted(each)])
    ending.wait([each for each in chosen if each.run.root not in ending.refused])
    return [ending.outcome(each) for each in chosen]


def _is_submitted(found: Standing) -> bool:
    return found.status.submission is not None or found.status.job_id is not None


@dataclass
class _Ending:
    """What was asked to end so far, and what could not be; by the runs' folders."""

    refused: dict[Path, str] = field(default_factory=dict)
    asked: set[Path] = field(default_factory=set)
    after: dict[Path, Standing] = field(default_factory=dict)

    def ask_scheduler(self, found: Sequence[Standing]) -> None:
        """End all jobs in one call."""
        self.refused |= {
            each.run.root: each.note or f"{each.where}; try again"
            for each in found
            if each.job is None and each.alive
        }
        ids = {each.run.root: each.job.id for each in found if each.job is not None}
        try:
            scheduler.cancel(list(ids.values()))
        except RunError as error:
            self.refused |= dict.fromkeys(ids, str(error))
        self.asked |= set(ids) - set(self.refused)

    def wait(self, found: Sequence[Standing]) -> None:
        """Until all of it has ended, or time is up; local runs are asked as soon as they can be."""
        begun = time.monotonic()
        runs = [each.run for each in found]
        while True:
            now = standings(runs)
            self.after = {each.run.root: each for each in now}
            left = [each for each in now if each.alive or is_locked(each.run)]
            self._ask_workers([each for each in left if not _is_submitted(each)])
            waited = time.monotonic() - begun
            patient = any(waited < self._patience_s(each) for each in left)
            if not patient:
                return
            time.sleep(POLL_S)

    def _patience_s(self, found: Standing) -> float:
        return PATIENCE_S if found.run.root in self.asked else SEEN_S

    def _ask_workers(self, found: Sequence[Standing]) -> None:
        for each in found:
            if each.state is State.PENDING and not is_locked(each.run):
                self.after[each.run.root] = _mark(each)
        seen = workers([each.run.lock for each in found if each.run.root not in self.asked])
        for each in found:
            if each.run.lock in seen:
                try:
                    seen[each.run.lock].terminate()
                except psutil.NoSuchProcess:
                    pass
                except psutil.AccessDenied:
                    continue
                self.asked.add(each.run.root)

    def outcome(self, before: Standing) -> Cancelled:
        """What became of a run; an end that it did not tell is written down."""
        name, root = before.run.root.name, before.run.root
        if root in self.refused:
            return Cancelled(name, self.refused[root], False)
        after = self.after[root]
        if after.alive or is_locked(after.run):
            why = "asked to end, and has not yet"
            if root not in self.asked:
                why = "not a process of yours that can be seen from here; cancel it there, as who started it"
            return Cancelled(name, f"{before.where}: {why}", False)
        if not has_told(after.status):
            after = _mark(after)  # on purpose: no other process is to take it over
        where = before.where or "not started yet"
        if after.state is State.CANCELLED:
            return Cancelled(name, where, True)
        return Cancelled(name, f"{where}: {after.state} by itself", True)


def _mark(found: Standing) -> Standing:
    """Say that a run was cancelled, unless another process has it just now."""
    return settle(replace(found, state=State.CANCELLED, alive=False, reason=REASON, sure=True))

"""Cancels the pending and running runs of a scope: each launcher ends its own, and this module waits for them.

There is no confirmation prompt. What a launcher cannot cancel is left alone and reported. A run that ends by itself
first keeps its own outcome.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantexp.errors import QuantexpError
from quantexp.launch.backend import Standing, has_recorded_end, kind_of, launcher_of
from quantexp.launch.ledger.settle import mark_cancelled
from quantexp.launch.ledger.standing import standings
from quantexp.runs.lock import is_locked
from quantexp.runs.status import State

#: Seconds to wait for a cancelled run to end.
PATIENCE_S = 40.0
#: Seconds to wait for the process of a starting run to appear.
APPEARANCE_S = 5.0
#: Seconds between two polls.
POLL_S = 0.5


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
    cancellation.ask_launchers(chosen)
    cancellation.wait([s for s in chosen if s.run.root not in cancellation.refused])
    return [cancellation.outcome(s) for s in chosen]


@dataclass
class _Cancellation:
    """A cancellation in progress; keys are the run folders."""

    #: Why a run could not be cancelled.
    refused: dict[Path, str] = field(default_factory=dict)
    #: Runs whose job or process received a signal.
    signalled: set[Path] = field(default_factory=set)
    #: The standings at the last poll.
    after: dict[Path, Standing] = field(default_factory=dict)

    def wait(self, chosen: Sequence[Standing]) -> None:
        """Wait until all runs have ended or the time is up; a process that appears meanwhile is ended too."""
        start = time.monotonic()
        runs = [standing.run for standing in chosen]
        while True:
            self.after = {standing.run.root: standing for standing in standings(runs)}
            live = [s for s in self.after.values() if s.alive or is_locked(s.run)]
            self.ask_launchers(live)
            waited_s = time.monotonic() - start
            if not any(waited_s < self._patience_s(standing) for standing in live):
                return
            time.sleep(POLL_S)

    def ask_launchers(self, current: Sequence[Standing]) -> None:
        """Ask the launchers of the runs that are neither signalled nor refused to end them, in one call for each."""
        of_kind: dict[str, list[Standing]] = {}
        for standing in current:
            if standing.run.root not in self.signalled | set(self.refused):
                of_kind.setdefault(kind_of(standing.status), []).append(standing)
        for kind, group in of_kind.items():
            try:
                answers = launcher_of(kind).cancel(group)
            except QuantexpError as error:
                answers = {standing.run.root: str(error) for standing in group}
            for root, why in answers.items():
                if why is None:
                    self.signalled.add(root)
                else:
                    self.refused[root] = why

    def _patience_s(self, standing: Standing) -> float:
        if standing.run.root in self.refused:
            return 0.0
        return PATIENCE_S if standing.run.root in self.signalled else APPEARANCE_S

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
            after = mark_cancelled(after)  # so that no other process takes it over
        where = before.where or "not started yet"
        if after.state is State.CANCELLED:
            return Cancelled(name, where, True)
        return Cancelled(name, f"{where}: {after.state} by itself", True)

"""Cancels the pending and running runs of a scope: each launcher ends its own, and this module waits for them.

There is no confirmation prompt. What a launcher cannot cancel is left alone and reported. A run that has not ended
after `KILL_AFTER_S` is killed. A run that ends by itself first keeps its own outcome.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantexp.errors import QuantexpError
from quantexp.folders import shell_word
from quantexp.launch.backend import Standing, has_recorded_end, kind_of, launcher_of
from quantexp.launch.ledger.standing import CANCELLED, mark_cancelled, standings
from quantexp.runs.fencing import claimant
from quantexp.runs.lock import is_locked
from quantexp.runs.status import State

#: Seconds that a cancelled run has to end; a worker writes its captured tensors for 20 s at most.
KILL_AFTER_S = 25.0
#: Seconds to wait for a cancelled run to end, killed or not.
PATIENCE_S = 40.0
#: Seconds to wait for the process of a starting run to appear.
APPEARANCE_S = 5.0
#: The reason of a run that was killed.
KILLED = f"{CANCELLED}, and killed because it did not end within {KILL_AFTER_S:.0f} s"
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
    #: Runs that were killed.
    killed: set[Path] = field(default_factory=set)
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
            if waited_s > KILL_AFTER_S:
                self._kill([s for s in live if s.run.root in self.signalled - self.killed])
            if not any(waited_s < self._patience_s(standing) for standing in live):
                return
            time.sleep(POLL_S)

    def ask_launchers(self, current: Sequence[Standing]) -> None:
        """Ask the launchers of the runs that are neither signalled nor refused to end them, in one call for each."""
        left = [s for s in current if s.run.root not in self.signalled | set(self.refused)]
        for kind, group in _by_kind(left).items():
            try:
                answers = launcher_of(kind).cancel(group)
            except QuantexpError as error:
                answers = {standing.run.root: str(error) for standing in group}
            for root, why in answers.items():
                if why is None:
                    self.signalled.add(root)
                else:
                    self.refused[root] = why

    def _kill(self, late: Sequence[Standing]) -> None:
        """Let the launchers kill the runs that did not end in time."""
        self.killed |= {standing.run.root for standing in late}
        for kind, group in _by_kind(late).items():
            with contextlib.suppress(QuantexpError):  # the run is reported as still running
                launcher_of(kind).kill(group, KILLED)

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
            why = f"still running {PATIENCE_S:.0f} s after the signal"
            if root in self.killed:
                why += f", though it was killed after {KILL_AFTER_S:.0f} s"
            if root not in self.signalled:
                host = after.status.host or "another machine"
                why = (
                    f"it is not a process of yours here; on {host}, as the user who started it: "
                    f"quantexp cancel {shell_word(str(root))}"
                )
                if claimant(after.run) is not None:
                    why += f"; if that machine is off, delete {after.run.claim}"
            return Cancelled(name, f"{before.where}: {why}", False)
        if not has_recorded_end(after.status):
            # so that no other process takes it over
            after = mark_cancelled(after, KILLED if root in self.killed else CANCELLED)
        where = before.where or "not started yet"
        if root in self.killed:
            where += f": killed, because it did not end within {KILL_AFTER_S:.0f} s"
        if after.state is State.CANCELLED:
            return Cancelled(name, where, True)
        return Cancelled(name, f"{where}: {after.state} by itself", True)


def _by_kind(standings: Sequence[Standing]) -> dict[str, list[Standing]]:
    """The runs of each kind of launcher."""
    groups: dict[str, list[Standing]] = {}
    for standing in standings:
        groups.setdefault(kind_of(standing.status), []).append(standing)
    return groups

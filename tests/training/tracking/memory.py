"""A tracker in memory, in the place of one that may wait for a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.events import Point, TrackedRun


def _nothing() -> None:
    pass


@dataclass
class Memory:
    """The tracker's server and the module in front of it: what it has received, and what it does before an answer."""

    NAME = "wandb"
    REMOTE = True
    #: Called before each answer: may raise, or wait.
    before: Callable[[], None] = _nothing
    id: str = "theirs"
    where: str = "https://there/theirs"
    starts: list[str | None] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    ends: list[tuple[State, str]] = field(default_factory=list)
    #: The threads that have called.
    threads: set[str] = field(default_factory=set)

    def destination(self, tracking: TrackingConfig, run: RunDir) -> str:
        return "memory"

    def start(self, run: TrackedRun, earlier: str | None = None) -> Memory:
        self._answer()
        self.starts.append(earlier)
        return self

    def log(self, points: Sequence[Point]) -> None:
        self._answer()
        self.iterations += [point.iteration for point in points]

    def end(self, state: State, reason: str) -> None:
        self._answer()
        self.ends.append((state, reason))

    def _answer(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.before()

"""The list of trackers, and those that a run enables."""

from __future__ import annotations

from typing import Protocol

from quantexp.runs.paths import RunDir
from quantexp.schema import TrackingConfig
from quantexp.training.tracking import mlflow, tensorboard, wandb
from quantexp.training.tracking.events import TrackedRun, Tracker


class Backend(Protocol):
    """The content of each tracker's module."""

    #: The tracker's key below `tracking`, its package, and its extra.
    NAME: str
    #: Whether the tracker may wait for a network; then it gets a process of its own.
    REMOTE: bool

    def destination(self, tracking: TrackingConfig, run: RunDir) -> str:
        """What the tracker stores where, in words."""

    def start(self, run: TrackedRun, earlier: str | None = None) -> Tracker:
        """Begin a run in the tracker, or continue the one with this id of the tracker's."""


_MODULES: list[Backend] = [tensorboard, wandb, mlflow]
BACKENDS = {backend.NAME: backend for backend in _MODULES}


def enabled(tracking: TrackingConfig) -> list[Backend]:
    """The trackers that a configuration enables."""
    sections = {name: getattr(tracking, name) for name in BACKENDS}
    return [BACKENDS[n] for n, s in sections.items() if (s if isinstance(s, bool) else s.enabled)]


def destinations(tracking: TrackingConfig, run: RunDir) -> dict[str, str]:
    """The destination of each enabled tracker."""
    return {each.NAME: each.destination(tracking, run) for each in enabled(tracking)}

"""The trackers, and those that a run turns on."""

from __future__ import annotations

from typing import Protocol

from quantexp.runs.paths import RunDir
from quantexp.schema import TrackingConfig
from quantexp.training.tracking import mlflow, tensorboard, wandb
from quantexp.training.tracking.events import TrackedRun, Tracker


class Backend(Protocol):
    """What each tracker's module holds."""

    #: Its key below `tracking`, the package it imports, and the extra that brings it.
    NAME: str
    #: Whether it may have to wait for a network; then it has a process of its own.
    REMOTE: bool

    def enabled(self, tracking: TrackingConfig) -> bool:
        """Whether it is asked for."""

    def destination(self, tracking: TrackingConfig, run: RunDir) -> str:
        """What is written where, in words."""

    def start(self, run: TrackedRun, earlier: str | None = None) -> Tracker:
        """Begin, or go on with the run that has this id of the tracker's."""


_MODULES: list[Backend] = [tensorboard, wandb, mlflow]
BACKENDS = {backend.NAME: backend for backend in _MODULES}


def asked_for(tracking: TrackingConfig) -> list[Backend]:
    """The trackers that a configuration turns on."""
    return [backend for backend in BACKENDS.values() if backend.enabled(tracking)]


def destinations(tracking: TrackingConfig, run: RunDir) -> dict[str, str]:
    """What each tracker will write where."""
    return {each.NAME: each.destination(tracking, run) for each in asked_for(tracking)}

"""The trackers there are, those a run asks for, and whether they are installed."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from quantexp.errors import ConfigError
from quantexp.paths import RunDir
from quantexp.schema import TrackingConfig
from quantexp.tracking import mlflow, tensorboard, wandb
from quantexp.tracking.told import TrackedRun, Tracker


class Backend(Protocol):
    """What each tracker's module holds."""

    #: Its key below `tracking`, and its extra.
    NAME: str
    #: What it imports.
    PACKAGE: str
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


def check_installed(tracking: TrackingConfig) -> None:
    """Refuse a tracker whose package is not there.

    Raises:
        ConfigError: with the extra that brings it.
    """
    for backend in asked_for(tracking):
        if not _is_installed(backend.PACKAGE):
            key = f"tracking.{backend.NAME}" + (".enabled" if backend.REMOTE else "")
            remedy = f"quantexp[{backend.NAME}]" if backend.REMOTE else backend.PACKAGE
            raise ConfigError(
                f"{key}=true needs the package {backend.PACKAGE}, which is not installed; pip install "
                f"'{remedy}', or set {key}=false"
            )


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name (W&B leaves wandb/ where it ran) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def destinations(tracking: TrackingConfig, run: RunDir) -> dict[str, str]:
    """What each tracker will write where."""
    return {each.NAME: each.destination(tracking, run) for each in asked_for(tracking)}

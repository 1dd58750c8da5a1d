"""A run's hash."""

from __future__ import annotations

from quantexp.launch.identity import hash8, identity
from quantexp.schema import Experiment


def digest(experiment: Experiment, device: str = "cpu") -> str:
    return hash8(identity(experiment, device))

"""One side of a comparison: the content of a run folder. Missing files give empty values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.analysis.tensors.run_record import (
    RunNames,
    read_config,
    read_names,
)
from quantexp.errors import RunError
from quantexp.runs.metrics import LossCurve, Speed, loss_curve, read_metrics, speed_of
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status, read_json, read_status

BASELINE = "bf16"


@dataclass(frozen=True)
class Side:
    """A run, as far as its folder can be read."""

    run: RunDir
    names: RunNames
    config: Mapping[str, Any]
    losses: LossCurve
    speed: Speed
    status: Status | None = None
    provenance: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] | None = None
    #: Messages about files that exist but cannot be read.
    trouble: tuple[str, ...] = ()

    @property
    def scheme(self) -> str:
        """The scheme's name, or the folder's name if it is unknown."""
        return self.names.scheme or self.names.run

    @property
    def state(self) -> str:
        """The state in status.json."""
        return "unknown" if self.status is None else self.status.state.value

    @property
    def last_loss(self) -> str:
        """The loss of the last iteration as text; `not finite` if it is not."""
        finite, nonfinite = self.losses.iterations, self.losses.nonfinite
        if nonfinite and (not finite or nonfinite[-1] > finite[-1]):
            return "not finite"
        return f"{self.losses.losses[-1]:.4f}" if finite else "-"

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """The run's identity; None if provenance.json does not have it."""
        content = (self.provenance or {}).get("identity")
        return content if isinstance(content, dict) else None

    @property
    def seed(self) -> int | None:
        """The seed of initial weights and data order."""
        training = self.config.get("training")
        seed = training.get("seed") if isinstance(training, dict) else None
        return seed if isinstance(seed, int) else None

    @property
    def maps(self) -> dict[int, list[Mapping[str, Any]]]:
        """The declared precision map by the iterations at which it changes; empty if it is unknown."""
        declared = (self.identity or {}).get("scheme")
        if isinstance(declared, list) and declared:
            return {int(iteration): list(entries) for iteration, entries in declared}
        entries = (self.precision or {}).get("entries")
        return {1: list(entries)} if isinstance(entries, list) else {}

    @property
    def is_baseline(self) -> bool:
        """Whether the run quantises nothing, according to the map, or to the name if there is no map."""
        maps = self.maps
        if maps:
            return all(e.get("format") == BASELINE for entries in maps.values() for e in entries)
        return self.names.scheme == BASELINE


def read_side(run: RunDir) -> Side:
    """Read a run folder; `trouble` names broken files.

    Raises:
        RunError: no such folder, or a config.yaml that is not YAML.
    """
    trouble: list[str] = []
    names = read_names(run)
    metrics = read_metrics(run)
    return Side(
        run,
        names,
        read_config(run),
        loss_curve(metrics),
        speed_of(metrics),
        _status(run, trouble),
        _mapping(run.provenance, trouble),
        _mapping(run.precision, trouble),
        tuple(trouble),
    )


def _status(run: RunDir, trouble: list[str]) -> Status | None:
    try:
        return read_status(run.status)
    except RunError as error:
        trouble.append(str(error))
        return None


def _mapping(file: Path, trouble: list[str]) -> Mapping[str, Any] | None:
    if not file.exists():
        return None
    try:
        content = read_json(file)
    except RunError as error:
        trouble.append(str(error))
        return None
    if not isinstance(content, dict):
        trouble.append(f"{file} must hold a mapping, got {type(content).__name__}")
        return None
    return content

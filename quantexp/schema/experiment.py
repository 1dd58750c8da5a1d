"""One run, whole, and what a sweep adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quantexp.schema.analysis import AnalysisConfig
from quantexp.schema.capture import CaptureConfig
from quantexp.schema.dataset import DatasetConfig
from quantexp.schema.launcher import LauncherConfig
from quantexp.schema.model import ModelConfig
from quantexp.schema.quant import QuantConfig
from quantexp.schema.tracking import TrackingConfig
from quantexp.schema.training import CheckpointConfig, EvaluationConfig, TrainingConfig


class MemoryCheck(Enum):
    """What becomes of a run whose predicted memory is more than there is."""

    #: It is refused before anything starts.
    check = "check"
    #: It starts all the same.
    ignore = "ignore"


@dataclass
class PathsConfig:
    """Where runs are written."""

    #: Folder of the run folders, below the working directory unless absolute.
    root: str = "runs"
    #: Prepared samples and index caches; null is the user's cache folder.
    cache: str | None = None


@dataclass
class Experiment:
    """One run, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    #: Whether a run that needs more memory than there is may start; no part of its identity.
    memory: MemoryCheck = MemoryCheck.check
    #: Show what would run and run nothing.
    dry_run: bool = False
    #: Run again although a completed run of this identity exists; the earlier attempt is kept.
    force: bool = False


@dataclass
class SweepConfig:
    """How the words of a sweep (`-m`) become points; without `-m` all of it stays null.

    Patterns are mappings of a key (`quant`, `training.lr`) to a shell pattern; all keys of a mapping must match, and of
    several mappings one. The shapes are checked in `quantexp.config.sweep.request`.
    """

    #: Swept keys that advance together instead of being multiplied: a list of keys, or several such lists.
    zip: Any = None
    #: A YAML file with explicit points: a list of mappings, override -> value.
    points: str | None = None
    #: Patterns of points to leave out.
    exclude: Any = None
    #: How many seeds, from training.seed on, or a list of seeds.
    seeds: Any = None
    #: Patterns of the points that run before all others.
    first: Any = None


@dataclass
class Composition(Experiment):
    """What is composed: an experiment, and how a sweep spreads it. A run's config.yaml holds no `sweep`."""

    sweep: SweepConfig = field(default_factory=SweepConfig)

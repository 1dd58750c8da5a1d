"""The complete configuration of one run, and of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quantexp.schema.capture import CaptureConfig
from quantexp.schema.dataset import DatasetConfig
from quantexp.schema.launcher import LauncherConfig, ParallelConfig
from quantexp.schema.limits import Limit, limited
from quantexp.schema.model import ModelConfig
from quantexp.schema.quant import QuantConfig
from quantexp.schema.tracking import TrackingConfig
from quantexp.schema.training import (
    CheckpointConfig,
    EvaluateConfig,
    EvaluationConfig,
    GradientConfig,
    TrainingConfig,
    run_and_iteration,
)


class MemoryCheck(Enum):
    """How to treat a run whose predicted memory exceeds the available memory."""

    #: Refuse it before anything starts.
    check = "check"
    #: Start it anyway.
    ignore = "ignore"


class Code(Enum):
    """Which source a run executes that goes on from its checkpoint."""

    #: That of its first start.
    recorded = "recorded"
    #: The present one; provenance.json records the change.
    current = "current"


class AutoDraw(Enum):
    """The figures drawn after a run."""

    everything = "true"
    quick = "quick"
    nothing = "false"


_AUTO = Limit(
    lambda text: text.lower() in {auto.value for auto in AutoDraw},
    "must be quick (one picture), true (all figures) or false (none)",
)


@dataclass
class AnalysisConfig:
    """The analysis after a run."""

    #: quick: figures/quick_analysis.png and report.html; true: also the whole tree of `quantexp draw`, as PNG;
    #: false: nothing.
    auto: str = limited("quick", _AUTO)

    @property
    def drawing(self) -> AutoDraw:
        """`auto` as an Enum; the field is a string because OmegaConf accepts no Enum member `true`.

        Raises:
            ValueError: any other value.
        """
        return AutoDraw(self.auto.lower())


@dataclass
class PathsConfig:
    """Folders of runs and caches."""

    #: Folder of the run folders, relative to the working directory unless absolute.
    root: str = "runs"
    #: A run folder in it that the run goes on in with another layout; `quantexp resume` sets it.
    run: str | None = None
    #: Prepared samples and index caches; null means the user's cache folder.
    cache: str | None = None


@dataclass
class Experiment:
    """The complete configuration of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    #: check: refuse a run that needs more memory than this machine, or the job's request, has for each process;
    #: a number: refuse it if a process needs more than so many units of 1e9 bytes; ignore: start it anyway.
    #: A MemoryCheck or a float, of which OmegaConf has no union; not part of a run's identity.
    memory: Any = MemoryCheck.check
    #: Show what would run, and run nothing.
    dry_run: bool = False
    #: Run again although a completed run with this identity exists; the earlier attempt is kept.
    force: bool = False
    code: Code = Code.recorded

    @property
    def first_iteration(self) -> int:
        """The first iteration of the run, from 1; an evaluation without training counts its own.

        Raises:
            ConfigError: `training.start_from` is not RUN@ITERATION.
        """
        start = self.training.start_from
        return 1 if start is None or self.evaluate.only else run_and_iteration(start)[1] + 1

    @property
    def memory_gb(self) -> float | None:
        """The memory of each process, in units of 1e9 bytes, if it is a number."""
        return None if isinstance(self.memory, MemoryCheck) else float(self.memory)

    @property
    def checks_memory(self) -> bool:
        """Whether a run that does not fit is refused."""
        return self.memory is not MemoryCheck.ignore


@dataclass
class SweepConfig:
    """How the arguments of a sweep (`-m`) become points; all fields are null without `-m`.

    Patterns are mappings of a key (`quant`, `training.lr`) to a shell pattern; all keys of a mapping must match, and
    at least one of several mappings. `quantexp.config.sweep.request` checks their shapes.
    """

    #: Swept keys that advance together instead of being multiplied: a list of keys, or several such lists.
    zip: Any = None
    #: A YAML file with explicit points: a list of mappings, override -> value.
    points: str | None = None
    #: Patterns of points to leave out.
    exclude: Any = None
    #: Number of seeds, from training.seed on, or a list of seeds.
    seeds: Any = None
    #: Patterns of the points that run before all others.
    first: Any = None
    #: Add the bf16 run beside every point, and N times again from perturbed initial weights (training.chaos).
    chaos: Any = None


@dataclass
class Composition(Experiment):
    """The composed configuration: an experiment and its sweep. A run's config.yaml contains no `sweep`."""

    sweep: SweepConfig = field(default_factory=SweepConfig)

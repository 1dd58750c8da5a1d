"""The typed configuration: every key that a YAML file or the command line may set, with its type and default.

Hydra composes into these dataclasses and `load` reads them back, so a misspelt key or a value of the wrong type is
always an error. They contain only data: a field declares the limits of its own values (`limits`), and
`validate` checks combinations of keys. They are not frozen because OmegaConf cannot build nested frozen dataclasses.
Choices are Enums whose member names are what the user types.
"""

from __future__ import annotations

from quantexp.schema.analysis import (
    AnalysisConfig,
    AutoDraw,
)
from quantexp.schema.capture import (
    CaptureConfig,
    CaptureLayout,
    CaptureLevel,
    CaptureRule,
    CaptureValues,
    SampleOf,
    StoreKind,
    TriggerConfig,
)
from quantexp.schema.dataset import (
    DatasetConfig,
    TokenizerKind,
)
from quantexp.schema.experiment import (
    Code,
    Composition,
    Experiment,
    MemoryCheck,
    PathsConfig,
    SweepConfig,
)
from quantexp.schema.launcher import (
    ContainerRuntime,
    JobConfig,
    LauncherConfig,
    SlurmConfig,
)
from quantexp.schema.model import (
    AuxLoss,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    YarnConfig,
)
from quantexp.schema.parallel import (
    Dispatcher,
    ParallelConfig,
    Unaligned,
)
from quantexp.schema.quant import (
    Backend,
    GradReduce,
    LinearDgrad,
    LinearFprop,
    LinearSite,
    LinearWgrad,
    Moments,
    NamedRecipe,
    Part,
    PvDgradP,
    PvDgradV,
    PvFprop,
    PvSite,
    QkDgradK,
    QkDgradQ,
    QkFprop,
    QkSite,
    QuantConfig,
    Rounded,
    RoundedAt,
    Rule,
    Slot,
)
from quantexp.schema.tracking import (
    MlflowConfig,
    TrackedStatistic,
    TrackingConfig,
    WandbConfig,
    WandbMode,
)
from quantexp.schema.training import (
    Aspect,
    AttentionPath,
    CheckpointConfig,
    EvaluateConfig,
    EvaluationConfig,
    GradientConfig,
    LrSchedule,
    Nonfinite,
    Precision,
    Recompute,
    TrainingConfig,
)

__all__ = [
    "AnalysisConfig",
    "Aspect",
    "AttentionPath",
    "AutoDraw",
    "AuxLoss",
    "Backend",
    "CaptureConfig",
    "CaptureLayout",
    "CaptureLevel",
    "CaptureRule",
    "CaptureValues",
    "CheckpointConfig",
    "Code",
    "Composition",
    "ContainerRuntime",
    "DatasetConfig",
    "Dispatcher",
    "EvaluateConfig",
    "EvaluationConfig",
    "Experiment",
    "GradReduce",
    "GradientConfig",
    "JobConfig",
    "LauncherConfig",
    "LinearDgrad",
    "LinearFprop",
    "LinearSite",
    "LinearWgrad",
    "LrSchedule",
    "MemoryCheck",
    "MlaConfig",
    "MlflowConfig",
    "ModelConfig",
    "MoeConfig",
    "Moments",
    "NamedRecipe",
    "Nonfinite",
    "ParallelConfig",
    "Part",
    "PathsConfig",
    "Precision",
    "PvDgradP",
    "PvDgradV",
    "PvFprop",
    "PvSite",
    "QkDgradK",
    "QkDgradQ",
    "QkFprop",
    "QkSite",
    "QuantConfig",
    "Recompute",
    "Rounded",
    "RoundedAt",
    "Rule",
    "SampleOf",
    "Slot",
    "SlurmConfig",
    "StoreKind",
    "SweepConfig",
    "TokenizerKind",
    "TrackedStatistic",
    "TrackingConfig",
    "TrainingConfig",
    "TriggerConfig",
    "Unaligned",
    "WandbConfig",
    "WandbMode",
    "YarnConfig",
]

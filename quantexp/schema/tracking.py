"""Configuration of the trackers that a run reports to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from quantexp.schema.limits import Limit, between, limited, limits

#: W&B: https://docs.wandb.ai/ref/python/init, `project` and `tags`.
_PROJECT = Limit(
    lambda text: re.fullmatch(r"[^/\\#?%:]{1,128}", text) is not None,
    "must be 1 to 128 characters, none of / \\ # ? % :",
)
LONGEST_TAG = 64
_TAG = Limit(
    lambda text: 1 <= len(text) <= LONGEST_TAG, f"must have 1 to {LONGEST_TAG} characters each"
)


class WandbMode(Enum):
    """Where Weights & Biases stores a run."""

    online = "online"
    offline = "offline"


@dataclass
class WandbConfig:
    """Weights & Biases. There is no key for an API key: it comes from `wandb login` or WANDB_API_KEY."""

    #: Needs the extra quantexp[wandb].
    enabled: bool = False
    project: str = limited("quantexp", _PROJECT)
    #: User or team; null is the account's own default.
    entity: str | None = None
    #: Group of runs on W&B's pages.
    group: str | None = None
    tags: list[str] = field(default_factory=list, metadata=limits(_TAG))
    #: null means WANDB_MODE, else online.
    mode: WandbMode | None = None


@dataclass
class MlflowConfig:
    """MLflow. There are no keys for a user or password: they come from MLflow's own environment variables."""

    #: Needs the extra quantexp[mlflow].
    enabled: bool = False
    #: Server or database; null means MLFLOW_TRACKING_URI, else mlflow.db beside the run folders.
    tracking_uri: str | None = None
    #: MLflow's experiment, created if it does not exist.
    experiment: str = "quantexp"


class TrackedStatistic(Enum):
    """A statistic of captured tensors that trackers receive."""

    amax = "amax"
    sqnr = "sqnr"
    underflow = "underflow"
    saturation = "saturation"
    histogram = "histogram"


@dataclass
class TrackingConfig:
    """The trackers that receive a run's metrics while it runs, in addition to its own folder."""

    #: Event files in the run folder's tensorboard/.
    tensorboard: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    #: Statistics of captured tensors that the trackers receive after each captured iteration: amax; sqnr, underflow and
    #: saturation, in the format of capture.format or else of the scheme; histogram, over binary exponents (MLflow has
    #: none). An empty list means none.
    statistics: list[TrackedStatistic] = field(default_factory=list)
    #: Limit on the number of their curves, each one statistic of one tensor. Beyond it, as many evenly spread layers as
    #: fit have curves.
    most_curves: int = limited(500, *between(1, 1_000_000))

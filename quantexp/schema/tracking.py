"""Configuration of the trackers that a run reports to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class WandbMode(Enum):
    """Where Weights & Biases stores a run."""

    online = "online"
    offline = "offline"


@dataclass
class WandbConfig:
    """Weights & Biases. There is no key for an API key: it comes from `wandb login` or WANDB_API_KEY."""

    #: Needs the extra quantexp[wandb].
    enabled: bool = False
    project: str = "quantexp"
    #: User or team; null is the account's own default.
    entity: str | None = None
    #: Group of runs on W&B's pages.
    group: str | None = None
    tags: list[str] = field(default_factory=list)
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


@dataclass
class TrackingConfig:
    """The trackers that receive a run's metrics while it runs, in addition to its own folder."""

    #: Event files in the run folder's tensorboard/.
    tensorboard: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)

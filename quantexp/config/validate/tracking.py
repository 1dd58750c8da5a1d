"""Checks that trackers would make only later, in another process: invalid names, and passwords in an address."""

from __future__ import annotations

import re

from quantexp.errors import ConfigError
from quantexp.runs.redaction import without_userinfo
from quantexp.schema import MlflowConfig, TrackingConfig, WandbConfig

#: W&B: https://docs.wandb.ai/ref/python/init, `project` and `tags`.
_PROJECT = re.compile(r"[^/\\#?%:]{1,128}")
LONGEST_TAG = 64


def validate_tracking(tracking: TrackingConfig) -> None:
    """Refuse invalid options of trackers.

    Raises:
        ConfigError: names the first invalid key.
    """
    _wandb(tracking.wandb)
    _mlflow(tracking.mlflow)


def _wandb(wandb: WandbConfig) -> None:
    if not _PROJECT.fullmatch(wandb.project):
        raise ConfigError(
            f"tracking.wandb.project must be 1 to 128 characters, none of / \\ # ? % :, got {wandb.project!r}"
        )
    for tag in wandb.tags:
        if not 1 <= len(tag) <= LONGEST_TAG:
            raise ConfigError(
                f"tracking.wandb.tags must have 1 to {LONGEST_TAG} characters each, got {tag!r}"
            )


def _mlflow(mlflow: MlflowConfig) -> None:
    if not mlflow.experiment.strip():
        raise ConfigError("tracking.mlflow.experiment must name an experiment, got an empty name")
    uri = mlflow.tracking_uri
    if uri is not None and without_userinfo(uri) != uri:
        raise ConfigError(
            f"tracking.mlflow.tracking_uri must hold no user and password, got {without_userinfo(uri)!r} with them; "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole MLFLOW_TRACKING_URI"
        )

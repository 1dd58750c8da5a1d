"""Checks of trackers before anything runs: invalid names, passwords in an address, packages that are not installed."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import fields
from importlib.metadata import entry_points
from urllib.parse import urlsplit

from quantexp.errors import ConfigError
from quantexp.runs.redaction import without_userinfo
from quantexp.schema import (
    CaptureLevel,
    Experiment,
    MlflowConfig,
    TrackedStatistic,
    TrackingConfig,
    WandbConfig,
)
from quantexp.schema.limits import check_limits

#: Addresses of MLflow without a scheme that are no folders, and the variable that lets it write into folders.
_NO_FOLDERS = ("databricks", "databricks-uc", "uc")
_ALLOWS_FOLDERS = "MLFLOW_ALLOW_FILE_STORE"
#: The stores of MLflow, by scheme; packages add others by entry points of this group.
_STORES = (
    "databricks",
    "databricks-uc",
    "http",
    "https",
    "mssql",
    "mysql",
    "postgresql",
    "sqlite",
    "uc",
)
_MORE_STORES = "mlflow.tracking_store"


def validate_tracking(tracking: TrackingConfig) -> None:
    """Refuse invalid options of trackers.

    Raises:
        ConfigError: names the first invalid key.
    """
    check_limits("tracking", tracking)
    mlflow = tracking.mlflow
    if not mlflow.experiment.strip():
        raise ConfigError("tracking.mlflow.experiment must name an experiment, got an empty name")
    uri = mlflow.tracking_uri
    if uri is not None and without_userinfo(uri) != uri:
        raise ConfigError(
            f"tracking.mlflow.tracking_uri must hold no user and password, got {without_userinfo(uri)!r} with them; "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole MLFLOW_TRACKING_URI"
        )


def validate_statistics(experiment: Experiment) -> None:
    """Refuse statistics for trackers that would stay empty, except where a run quantises nothing.

    The bf16 run of a sweep has no format to score, and the other runs of the sweep do.

    Raises:
        ConfigError: names the statistic and what it lacks.
    """
    tracking = experiment.tracking
    statistics, key = tracking.statistics, "tracking.statistics"
    if not statistics:
        return
    names = [each.value for each in statistics]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} must have each statistic once, got [{', '.join(names)}]")
    draws = tracking.tensorboard or tracking.wandb.enabled
    if not (draws or tracking.mlflow.enabled):
        raise ConfigError(
            f"{key} needs a tracker: set tracking.tensorboard, tracking.wandb.enabled or tracking.mlflow.enabled, or "
            f"{key}=[]"
        )
    if TrackedStatistic.histogram in statistics and not draws:
        raise ConfigError(
            f"{key} has histogram, which MLflow cannot show: set tracking.tensorboard or tracking.wandb.enabled, or "
            "leave it out"
        )
    if experiment.evaluate.only or experiment.capture.level is CaptureLevel.off:
        raise ConfigError(
            f"{key} needs captured iterations of a training: set capture=stats or capture=tensors, or {key}=[]"
        )
    from quantexp.capture.select.curves import possible_curves
    from quantexp.config.in_force import sites_in_force

    possible = {curve.statistic for curve in possible_curves(experiment, [*TrackedStatistic])}
    if not possible:
        raise ConfigError(
            f"{key} has {names[0]}, and no tensor is captured before quantisation: see capture.rules and "
            f"capture.values, or set {key}=[]"
        )
    missing = [each.value for each in statistics if each not in possible]
    if missing and sites_in_force(experiment):
        raise ConfigError(
            f"{key} has {missing[0]}, and the scheme quantises no captured tensor: set capture.format, or leave it out"
        )


def check_installed(tracking: TrackingConfig) -> None:
    """Refuse a tracker whose package is not installed. A tracker, its package and its key have one name.

    Raises:
        ConfigError: with the extra that brings it.
    """
    for field in fields(tracking):
        tracker, key = getattr(tracking, field.name), f"tracking.{field.name}"
        if isinstance(tracker, bool):
            enabled, remedy = tracker, field.name
        elif not isinstance(tracker, WandbConfig | MlflowConfig):
            continue  # an option of all trackers
        else:
            enabled, key, remedy = tracker.enabled, f"{key}.enabled", f"quantexp[{field.name}]"
        if enabled and not _is_installed(field.name):
            raise ConfigError(
                f"{key}=true needs the package {field.name}, which is not installed; pip install "
                f"'{remedy}', or set {key}=false"
            )


def check_store(tracking: TrackingConfig) -> None:
    """Refuse what MLflow refuses as its store when the first run is uploaded: a folder of files, an unknown scheme.

    Raises:
        ConfigError: with the address, and a store that MLflow takes.
    """
    mlflow, variable = tracking.mlflow, "MLFLOW_TRACKING_URI"
    uri = mlflow.tracking_uri or os.environ.get(variable)
    if not mlflow.enabled or not uri or uri in _NO_FOLDERS:
        return
    key = "tracking.mlflow.tracking_uri" if mlflow.tracking_uri else variable
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme in ("", "file") and os.environ.get(_ALLOWS_FOLDERS, "").lower() not in ("true", "1"):
        raise ConfigError(
            f"{key} must be a server or a database, got {uri!r}: MLflow refuses to write into a folder of files; take "
            f"sqlite:///FOLDER/mlflow.db, or set {_ALLOWS_FOLDERS}=true"
        )
    known = {"", "file", *_STORES, *entry_points(group=_MORE_STORES).names}
    if scheme not in known:
        raise ConfigError(
            f"{key} must be a server or a database, got {uri!r}: MLflow has no store of the kind {scheme!r}; take "
            "https://SERVER, or sqlite:///FOLDER/mlflow.db"
        )


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name (W&B leaves wandb/ where it ran) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None

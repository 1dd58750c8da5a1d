"""Checks that trackers would make only later, in another process: invalid names, and passwords in an address."""

from __future__ import annotations

from quantexp.errors import ConfigError
from quantexp.runs.redaction import without_userinfo
from quantexp.schema import TrackingConfig
from quantexp.schema.limits import check_limits


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

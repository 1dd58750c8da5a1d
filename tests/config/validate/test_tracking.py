"""Every refusal of `validate_tracking`, by its message."""

from __future__ import annotations

import re

import pytest

from quantexp.config.compose import compose
from quantexp.config.validate.tracking import validate_tracking
from quantexp.errors import ConfigError
from quantexp.schema import MlflowConfig, TrackingConfig, WandbConfig


def refusal(tracking: TrackingConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_tracking(tracking)
    return str(caught.value)


def test_defaults_pass() -> None:
    validate_tracking(TrackingConfig())


@pytest.mark.parametrize("project", ["", "a/b", "a:b", "50%", "x" * 129])
def test_project_that_wandb_would_refuse_is_refused(project: str) -> None:
    assert refusal(TrackingConfig(wandb=WandbConfig(project=project))) == (
        f"tracking.wandb.project must be 1 to 128 characters, none of / \\ # ? % :, got {project!r}"
    )


@pytest.mark.parametrize("tag", ["", "x" * 65])
def test_tag_that_wandb_would_refuse_is_refused(tag: str) -> None:
    message = refusal(TrackingConfig(wandb=WandbConfig(tags=["fine", tag])))
    assert message == f"tracking.wandb.tags must have 1 to 64 characters each, got {tag!r}"


@pytest.mark.parametrize("name", ["", " "])
def test_experiment_has_a_name(name: str) -> None:
    message = refusal(TrackingConfig(mlflow=MlflowConfig(experiment=name)))
    assert message == "tracking.mlflow.experiment must name an experiment, got an empty name"


def test_password_in_an_address_is_refused_and_not_repeated() -> None:
    uri = "tracking.mlflow.tracking_uri='https://me:password@host/path'"
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "tracking.mlflow.tracking_uri must hold no user and password, got 'https://host/path' with them; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole MLFLOW_TRACKING_URI"
        ),
    ):
        compose(["training=fast", uri], None, {})


@pytest.mark.parametrize(
    "word", ["+tracking.wandb.api_key", "tracking.wandb.api_key", "tracking.mlflow.password"]
)
def test_there_is_no_key_for_a_secret(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key {word.lstrip('+')}") as caught:
        compose(["training=fast", f"{word}=aLongSecretValue"], None, {})
    assert "aLongSecretValue" not in str(caught.value)

"""Every refusal of `validate_tracking` and `validate_statistics`, by its message."""

from __future__ import annotations

import re

import pytest

from quantexp.config.compose import compose
from quantexp.config.load import from_plain, plain
from quantexp.config.validate.tracking import check_store, validate_tracking
from quantexp.errors import ConfigError
from quantexp.schema import MlflowConfig, TrackedStatistic, TrackingConfig, WandbConfig


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["tracking.statistics=[amax,sqnr,amax]"],
            "tracking.statistics must have each statistic once, got [amax, sqnr, amax]",
        ),
        (
            ["tracking.statistics=[amax]", "tracking.tensorboard=false"],
            "tracking.statistics needs a tracker: set tracking.tensorboard, tracking.wandb.enabled or "
            "tracking.mlflow.enabled, or tracking.statistics=[]",
        ),
        (
            [
                "tracking.statistics=[histogram]",
                "tracking.tensorboard=false",
                "tracking.mlflow.enabled=true",
            ],
            "tracking.statistics has histogram, which MLflow cannot show: set tracking.tensorboard or "
            "tracking.wandb.enabled, or leave it out",
        ),
        (
            ["tracking.statistics=[amax]", "capture=off"],
            "tracking.statistics needs captured iterations of a training: set capture=stats or capture=tensors, or "
            "tracking.statistics=[]",
        ),
        (
            [
                "tracking.statistics=[amax,underflow]",
                "quant=FA_mxfp8",
                "capture=stats",
                "capture.rules=[{modules: [attention], level: 'off'}]",
            ],
            "tracking.statistics has underflow, and the scheme quantises no captured tensor: set capture.format, or "
            "leave it out",
        ),
        (
            [
                "quant=bf16",
                "tracking.statistics=[sqnr]",
                "capture=stats",
                "capture.rules=[{level: 'off'}]",
            ],
            "tracking.statistics has sqnr, and no tensor is captured before quantisation: see capture.rules and "
            "capture.values, or set tracking.statistics=[]",
        ),
        (["tracking.most_curves=0"], "tracking.most_curves must be at least 1, got 0"),
    ],
)
def test_statistics_that_would_stay_empty_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["training=fast", *words], None, {})
    assert str(caught.value) == message


def test_statistic_that_does_not_exist_is_refused_with_the_nearest() -> None:
    words = ["training=fast", "tracking.statistics=[amx]"]
    with pytest.raises(
        ConfigError,
        match=r"tracking.statistics\[0\] must be one of amax, sqnr, .*, got 'amx'; did you mean amax",
    ):
        compose(words, None, {})


def test_bf16_takes_its_part_in_a_sweep_whose_schemes_are_scored() -> None:
    experiment = compose(["training=fast", "quant=bf16", "tracking.statistics=[sqnr]"], None, {})
    assert experiment.tracking.statistics == [TrackedStatistic.sqnr]


def test_bf16_is_scored_in_the_format_of_the_capture() -> None:
    words = ["training=fast", "quant=bf16", "tracking.statistics=[sqnr]", "capture.format=mxfp8"]
    experiment = compose(words, None, {})
    assert experiment.tracking.statistics == [TrackedStatistic.sqnr]
    assert from_plain(plain(experiment)) == experiment


@pytest.mark.parametrize(
    "uri", ["file:///tmp/mlruns", "file:mlruns", "mlruns", "/tmp/mlruns", "./a"]
)
def test_folder_of_files_is_no_store_of_mlflow(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    words = f"must be a server or a database, got {uri!r}: MLflow refuses to write into a folder"
    with pytest.raises(ConfigError) as caught:
        check_store(TrackingConfig(mlflow=MlflowConfig(enabled=True, tracking_uri=uri)))
    assert str(caught.value).startswith(f"tracking.mlflow.tracking_uri {words}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError) as caught:
        check_store(TrackingConfig(mlflow=MlflowConfig(enabled=True)))
    assert str(caught.value).startswith(f"MLFLOW_TRACKING_URI {words}")
    check_store(TrackingConfig(mlflow=MlflowConfig(enabled=False)))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_store(TrackingConfig(mlflow=MlflowConfig(enabled=True)))


@pytest.mark.parametrize(
    ("uri", "kind"), [("ftp://a/b", "ftp"), ("s3://a/b", "s3"), ("mongodb+srv://a", "mongodb")]
)
def test_a_scheme_that_mlflow_does_not_know_is_refused(uri: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_store(TrackingConfig(mlflow=MlflowConfig(enabled=True, tracking_uri=uri)))
    assert str(caught.value) == (
        f"tracking.mlflow.tracking_uri must be a server or a database, got {uri!r}: MLflow has no store of the kind "
        f"{kind!r}; take https://SERVER, or sqlite:///FOLDER/mlflow.db"
    )


@pytest.mark.parametrize(
    "uri",
    [
        *("https://a.b", "sqlite:///a.db", "databricks", "databricks://me"),
        "postgresql+psycopg2://a/b",
    ],
)
def test_server_or_database_is_a_store_of_mlflow(uri: str) -> None:
    check_store(TrackingConfig(mlflow=MlflowConfig(enabled=True, tracking_uri=uri)))

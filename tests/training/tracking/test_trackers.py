"""The trackers of a run, and an early error where one is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.config.sweep.points import compose_points
from quantexp.config.validate.tracking import check_installed
from quantexp.errors import ConfigError
from quantexp.runs.paths import RunDir
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.trackers import BACKENDS, destinations, enabled

BOTH = ["tracking.wandb.enabled=true", "tracking.mlflow.enabled=true"]
Missing = Callable[..., None]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Missing:
    """Hide an installed package."""

    def take(package: str, instead: ModuleSpec | None = None) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: instead if name == package else find(name)
        )

    return take


def names(*overrides: str) -> list[str]:
    tracking = compose(["training=fast", *overrides], None, {}).tracking
    return [backend.NAME for backend in enabled(tracking)]


def test_event_files_are_on_by_default_and_other_trackers_on_request() -> None:
    assert names() == ["tensorboard"]
    assert names(*BOTH) == ["tensorboard", "wandb", "mlflow"]
    assert names("tracking.tensorboard=false") == []


def test_all_modules_have_the_same_names() -> None:
    """Knowing one is knowing all."""

    def public(name: str) -> set[str]:
        module = vars(BACKENDS[name])
        own = {
            key
            for key, value in module.items()
            if getattr(value, "__module__", "") == module["__name__"]
        }
        return {key for key in own if key.islower() and not key.startswith("_")} | {
            key for key in module if key in ("NAME", "REMOTE")
        }

    assert {"NAME", "REMOTE", "destination", "start"} <= public("tensorboard")
    assert public("tensorboard") <= public("wandb")
    assert public("wandb") <= public("mlflow")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_refused_with_its_extra(missing: Missing, name: str) -> None:
    missing(name)
    with pytest.raises(
        ConfigError,
        match=rf"tracking\.{name}\.enabled=true needs the package {name}, which is not installed; "
        rf"pip install 'quantexp\[{name}\]', or set tracking\.{name}\.enabled=false",
    ):
        names(f"tracking.{name}.enabled=true")
    assert names() == ["tensorboard"], "who does not ask does not need it"


def test_missing_tensorboard_is_refused_with_the_remedy(missing: Missing) -> None:
    missing("tensorboard")
    with pytest.raises(
        ConfigError,
        match=r"tracking\.tensorboard=true needs the package tensorboard, which is not installed; pip "
        r"install 'tensorboard', or set tracking\.tensorboard=false",
    ):
        check_installed(TrackingConfig())


def test_folder_of_the_packages_name_is_no_package(missing: Missing) -> None:
    """W&B makes a folder wandb/ where it runs, which Python takes for a namespace package."""
    missing("wandb", ModuleSpec("wandb", None))
    with pytest.raises(ConfigError, match="needs the package wandb, which is not installed"):
        names("tracking.wandb.enabled=true")


def test_no_point_of_a_sweep_runs_where_one_cannot_be_tracked(missing: Missing) -> None:
    missing("mlflow")
    with pytest.raises(ConfigError, match="needs the package mlflow"):
        compose_points(["training=fast", "tracking.mlflow.enabled=false,true"], None, {})


def test_destinations_name_the_place_of_each_trackers_data() -> None:
    run = RunDir(Path("/runs/name-0a1b2c3d"))
    tracking = compose(["training=fast", *BOTH], None, {}).tracking
    assert destinations(tracking, run) == {
        "tensorboard": "/runs/name-0a1b2c3d/tensorboard",
        "wandb": "project quantexp, run name-0a1b2c3d, as WANDB_MODE says, else online; its files in "
        "/runs/name-0a1b2c3d/wandb",
        "mlflow": "experiment quantexp, run name-0a1b2c3d, at sqlite:////runs/mlflow.db",
    }
    words = ["tracking.wandb.entity=us", "tracking.wandb.mode=offline"]
    tracking = compose(["training=fast", *BOTH, *words], None, {}).tracking
    assert destinations(tracking, run)["wandb"].startswith(
        "project us/quantexp, run name-0a1b2c3d, offline; "
    )


def test_choosing_trackers_imports_none_of_their_packages() -> None:
    code = (
        "import sys, quantexp.training.context, quantexp.training.tracking.upload;"
        "print([name for name in ('tensorboard', 'wandb', 'mlflow', 'torch') if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"

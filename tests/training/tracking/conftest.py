"""Fixtures of the trackers' tests: a run folder without a run, lines of metrics, and a real run with all trackers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantexp.config.load import save
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status, write_status
from quantexp.schema import Experiment
from quantexp.training.tracking.events import TrackedRun

#: Settings that isolate the libraries: no network, no files in the home folder.
ALONE = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
#: Secrets in the environment of the real run. W&B requires 40 characters.
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_aSecretOfTheHub",
    "AWS_SECRET_ACCESS_KEY": "aSecretOfTheCloud/+=",
    "MLFLOW_TRACKING_PASSWORD": "aSecretOfTheServer",
    "MY_SERVICE_API_KEY": "aSecretOfAService",
}
#: Of the real run: as long as the clients take to start, however busy the machine is.
ITERATIONS = 40


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**ALONE, "WANDB_CACHE_DIR": str(tmp_path / "wandb-cache")}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tracked(tiny: Callable[..., Experiment], tmp_path: Path) -> Callable[..., TrackedRun]:
    """An attempt with configuration and status on disk, and nothing else."""

    def make(*overrides: str, status: Status | None = None) -> TrackedRun:
        run = RunDir(tmp_path / "runs" / "tiny_data_bf16-0a1b2c3d")
        run.logs.mkdir(parents=True, exist_ok=True)
        experiment = tiny(*overrides)
        save(experiment, run.config)
        status = status or Status(created="2026-01-02T03:04:05+00:00")
        write_status(run.status, status)
        return TrackedRun(run, experiment, run.attempt, status.created)

    return make


def line(iteration: int, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; successive lines are one second apart."""
    return {
        "iteration": iteration,
        "loss": 5.0 - iteration,
        "grad_norm": 1.5,
        "lr": 1e-4,
        "tokens": 128,
        "step_time_s": 0.5,
        "tokens_per_s": 256.0,
        "tflops": 0.25,
        "memory_gb": 2.0,
        "skipped": False,
        "loss_scale": None,
        "time": f"2026-01-02T03:{5 + iteration // 60:02}:{iteration % 60:02}.500+00:00",
        **values,
    }


def curves_line(iteration: int) -> dict[str, Any]:
    """A line of curves.jsonl, with a scalar and a histogram that differ by iteration."""
    return {
        "iteration": iteration,
        "scalars": {"amax/L0-fc1/input": 0.5 + iteration},
        "histograms": {"log2_magnitude/L0/key": {"first": -3, "counts": [iteration, 0, 7]}},
    }


@pytest.fixture(scope="session")
def real(tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of the command itself with every tracker on, W&B offline, MLflow's own database, and secrets set."""
    folder = tmp_path_factory.mktemp("tracked")
    caches = {"WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_CONFIG_DIR": str(folder / "config")}
    words = ["tracking.wandb.enabled=true", "tracking.wandb.mode=offline", "capture=off"]
    words += ["tracking.wandb.tags=[tiny]", "tracking.wandb.group=tests"]
    words += ["tracking.mlflow.enabled=true", f"training.iterations={ITERATIONS}"]
    process = subprocess.run(
        [sys.executable, "-m", "quantexp", *tiny_words, *words],
        cwd=folder,
        env={**os.environ, **ALONE, **SECRETS, **caches, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (run,) = (folder / "runs").glob("llama*")
    (run / "logs" / "summary.txt").write_text(process.stdout + process.stderr)
    return RunDir(run)

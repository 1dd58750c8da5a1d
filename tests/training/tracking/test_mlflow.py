"""MLflow itself: a run in its own database, read back with SQL; and an absent server."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from quantexp.runs.curves import CurvesLine
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status
from quantexp.training.tracking import mlflow
from quantexp.training.tracking.events import TrackedRun, point

from .conftest import ITERATIONS, curves_line, line
from .servers import absent, silent

Make = Callable[..., TrackedRun]


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture(scope="session")
def database(real: RunDir) -> Path:
    return real.root.parent / "mlflow.db"


@pytest.mark.slow
def test_run_has_its_name_its_id_and_its_end(database: Path, real: RunDir) -> None:
    status = read_status(real.status)
    assert status is not None
    delivery = status.tracking["mlflow"]
    assert rows(database, "select name, run_uuid, status from runs") == [
        (f"{real.root.name}.1", delivery["id"], "FINISHED")
    ]
    assert rows(database, "select name from experiments where experiment_id > 0") == [("quantexp",)]
    assert delivery["where"] == f"sqlite:///{database}"
    assert (delivery["iteration"], delivery["ended"], delivery["trouble"]) == (ITERATIONS, True, "")
    tags = dict(rows(database, "select key, value from tags"))
    assert tags["quantexp.run"] == real.root.name
    assert tags["quantexp.attempt"] == "1"
    assert tags["quantexp.state"] == "completed"
    assert "quantexp.reason" not in tags


@pytest.mark.slow
def test_metrics_are_those_of_the_run_folder(database: Path, real: RunDir) -> None:
    measured = [json.loads(row) for row in real.metrics.read_text().splitlines()]
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("perf/tflops", "tflops")):
        query = f"select step, value, timestamp from metrics where key = '{tag}' order by step"
        assert rows(database, query) == [
            (m["iteration"], m[key], round(datetime.fromisoformat(m["time"]).timestamp() * 1000))
            for m in measured
        ]


@pytest.mark.slow
def test_hyperparameters_are_parameters(database: Path) -> None:
    params = dict(rows(database, "select key, value from params"))
    assert params["training.iterations"] == str(ITERATIONS)
    assert params["quant.name"] == "bf16"
    assert params["dataset.label"] == "wikipedia (built-in sample)"


@pytest.mark.slow
def test_nothing_is_left_in_the_working_folder(real: RunDir) -> None:
    folders = {path.name for path in real.root.parent.parent.iterdir()}
    assert folders <= {"runs", "cache", "config"}, "neither mlruns nor wandb"


SCRIPT = """\
import sys
from quantexp.training.tracking import upload
sys.exit(upload.main(["mlflow", sys.argv[1]]))
"""


def record(run: TrackedRun) -> dict[str, Any]:
    status = read_status(run.folder.status)
    assert status is not None
    return status.tracking["mlflow"]


def send(run: TrackedRun) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(run.folder.root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_failed_run_of_many_iterations_is_sent_in_parts(tracked: Make) -> None:
    """The run has more values than MLflow accepts at once, and a loss that is not finite."""
    status = Status(State.FAILED, "loss nan", created="2026-01-02T03:04:05+00:00")
    run = tracked("tracking.mlflow.enabled=true", "quant=linear_mxfp8", status=status)
    lines = [line(i, loss=None if i == 400 else 1.0) for i in range(1, 401)]
    run.folder.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    process = send(run)
    assert process.returncode == 0, process.stderr
    database = run.folder.root.parent / "mlflow.db"
    assert rows(database, "select count(*) from metrics where key = 'train/loss'") == [(400,)]
    assert rows(database, "select is_nan from metrics where step = 400 and key = 'train/loss'") == [
        (1,)
    ]
    assert rows(database, "select status from runs") == [("FAILED",)]
    assert ("quantexp.reason", "loss nan") in rows(database, "select key, value from tags")


@pytest.mark.slow
def test_restarted_run_continues_its_mlflow_run(tracked: Make) -> None:
    preempted = Status(State.PREEMPTED, "node taken", created="2026-01-02T03:04:05+00:00")
    words = ("tracking.mlflow.enabled=true", "tracking.mlflow.experiment=mine")
    run = tracked(*words, status=preempted)
    run.folder.metrics.write_text(json.dumps(line(1)) + "\n")
    assert send(run).returncode == 0
    database = run.folder.root.parent / "mlflow.db"
    assert rows(database, "select status from runs") == [("KILLED",)]
    with run.folder.metrics.open("a") as stream:
        stream.write(json.dumps(line(2)) + "\n")
    # A rank that was killed after it sent iteration 1, and before it recorded so.
    not_recorded = {**record(run), "ended": False, "iteration": 0}
    completed = replace(preempted, state=State.COMPLETED, tracking={"mlflow": not_recorded})
    run = tracked(*words, status=completed)
    assert send(run).returncode == 0
    assert rows(database, "select status from runs") == [("FINISHED",)]
    assert rows(database, "select step from metrics where key = 'train/loss'") == [(1,), (2,)]
    names = "select name from experiments where experiment_id > 0"
    assert rows(database, names) == [("mine",)]


@pytest.mark.slow
def test_statistics_are_metrics_at_their_iteration(tracked: Make) -> None:
    status = Status(State.COMPLETED, created="2026-01-02T03:04:05+00:00")
    run = tracked("tracking.mlflow.enabled=true", status=status)
    run.folder.metrics.write_text("".join(json.dumps(line(i)) + "\n" for i in (1, 2, 3)))
    run.folder.curves.write_text(json.dumps(curves_line(2)) + "\n")
    process = send(run)
    assert process.returncode == 0, process.stderr
    database = run.folder.root.parent / "mlflow.db"
    query = "select step, value from metrics where key = 'amax/L0-fc1/input'"
    assert rows(database, query) == [(2, 2.5)]
    assert rows(database, "select key from metrics where key like 'log2%'") == []


def test_loss_is_the_last_metric_of_a_point(tracked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that continues takes the steps of the loss for those that MLflow has completely."""
    sent: list[str] = []

    class Client:
        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            sent.extend(metric.key for metric in metrics)

    tracker = mlflow.MlflowTracker.__new__(mlflow.MlflowTracker)
    tracker.id, tracker._client, tracker._params, tracker._last = "theirs", Client(), {}, 0
    tracker.log([point(line(1), cast(CurvesLine, curves_line(1)))])
    assert sent[-1] == "train/loss"
    assert "amax/L0-fc1/input" in sent


def test_servers_address_comes_from_the_configuration_the_environment_or_the_runs_folder(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked()
    where = run.experiment.tracking
    assert mlflow.tracking_uri(where, run.folder) == f"sqlite:///{run.folder.root.parent}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:password@theirs")
    assert mlflow.tracking_uri(where, run.folder) == "https://me:password@theirs"
    assert mlflow.destination(where, run.folder).endswith("at https://theirs")
    where.mlflow.tracking_uri = "https://ours"
    assert mlflow.tracking_uri(where, run.folder) == "https://ours"


@pytest.mark.slow
def test_absent_server_is_recorded_as_trouble(
    tracked: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either nothing listens or a server never answers; both end within MLflow's shortened patience."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    ended = Status(State.COMPLETED, created="2026-01-02T03:04:05+00:00")
    with silent() as server:
        for address in (server, absent()):
            uri = f"tracking.mlflow.tracking_uri={address}"
            run = tracked("tracking.mlflow.enabled=true", uri, status=ended)
            assert send(run).returncode == 1
            assert record(run)["trouble"].startswith("MlflowException: API request to ")
            assert (record(run)["id"], record(run)["ended"]) == (None, False)


@pytest.mark.slow
def test_mlflow_is_less_patient_than_by_default() -> None:
    code = (
        "import os; from quantexp.training.tracking import mlflow;"
        "os.environ.update({k: v for k, v in mlflow._VARIABLES.items() if k not in os.environ});"
        "from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as t;"
        "from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as r; print(t.get(), r.get())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    timeout_s, retries = map(float, process.stdout.split())
    assert math.isclose(timeout_s * (1 + retries), 20)

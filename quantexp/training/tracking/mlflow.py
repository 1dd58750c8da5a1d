"""MLflow: a run in an experiment of a tracking server or of a database, from the courier's process.

Without an address it is a SQLite file beside the run folders. User, password and token are read by MLflow itself, from
MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN. The server gives a run its id; a restarted
run goes on with the id that it left in the folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import without_userinfo
from quantexp.runs.status import State
from quantexp.schema import TrackingConfig
from quantexp.training.tracking.events import Point, TrackedRun, hyperparameters

NAME = "mlflow"
REMOTE = True

#: MLflow's limits of one request and of a parameter's length.
MAX_METRICS, MAX_PARAMS, LONGEST_PARAM = 1000, 100, 6000
#: How MLflow calls the ends of a run.
_ENDS = {State.COMPLETED: "FINISHED", State.FAILED: "FAILED"}
#: MLflow's own patience is minutes; the courier asks again by itself.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

_T = TypeVar("_T")


def enabled(tracking: TrackingConfig) -> bool:
    """Whether it is asked for."""
    return tracking.mlflow.enabled


def destination(tracking: TrackingConfig, run: RunDir) -> str:
    """What is written where, in words."""
    uri = without_userinfo(tracking_uri(tracking, run))
    return f"experiment {tracking.mlflow.experiment}, run {run.root.name}, at {uri}"


def tracking_uri(tracking: TrackingConfig, run: RunDir) -> str:
    """The server or database: as configured, as MLFLOW_TRACKING_URI says, or beside the run folder."""
    given = tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return given or f"sqlite:///{run.root.parent / 'mlflow.db'}"


def start(run: TrackedRun, earlier: str | None = None) -> MlflowTracker:
    """The MLflow run: made there, or the earlier one by its id.

    Raises:
        mlflow.exceptions.MlflowException: no answer, or a refusal.
    """
    return MlflowTracker(run, earlier)


class MlflowTracker:
    """One MLflow run."""

    def __init__(self, run: TrackedRun, earlier: str | None) -> None:
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        from mlflow.tracking import MlflowClient

        uri = tracking_uri(run.experiment.tracking, run.folder)
        self._client = MlflowClient(tracking_uri=uri)
        self._params = hyperparameters(
            run.experiment
        )  # sent again after a restart, which changes nothing
        if earlier is None:
            experiment = _experiment(self._client, run.experiment.tracking.mlflow.experiment)
            tags = {"quantexp.run": run.folder.root.name, "quantexp.attempt": str(run.attempt)}
            info = self._client.create_run(experiment, run_name=run.name, tags=tags).info
        else:
            self._client.update_run(earlier, status="RUNNING")
            info = self._client.get_run(earlier).info
        self.id = str(info.run_id)
        shown = without_userinfo(uri)
        page = f"{shown.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{self.id}"
        self.where = page if shown.startswith("http") else shown

    def log(self, points: Sequence[Point]) -> None:
        """Metrics with the time they were measured; before the first, the hyperparameters as parameters."""
        from mlflow.entities import Metric, Param

        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in self._params.items()]
        for part in _parts(params, MAX_PARAMS):
            self._client.log_batch(self.id, params=part)
        self._params = {}
        metrics = [
            Metric(tag, value, round(point.time_s * 1000), point.iteration)
            for point in points
            for tag, value in point.scalars.items()
        ]
        for batch in _parts(metrics, MAX_METRICS):
            self._client.log_batch(self.id, metrics=batch)

    def end(self, state: State, reason: str) -> None:
        """Finished, failed or killed, with the reason as a tag."""
        self._client.set_tag(self.id, "quantexp.state", state.value)
        if reason:
            self._client.set_tag(self.id, "quantexp.reason", reason)
        self._client.set_terminated(
            self.id, _ENDS.get(state, "KILLED"), end_time=round(time.time() * 1000)
        )


def _experiment(client: Any, name: str) -> str:
    """The id of MLflow's experiment, which another run may be making at the same time."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _parts(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part

"""MLflow: a run in an experiment of a tracking server or database, from the thread of its upload.

Without an address the database is a SQLite file beside the run folders. MLflow itself reads user, password and token
from MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN. The server assigns the id of a run;
a restarted run continues with the id in its folder, after the last step that MLflow has.
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
from quantexp.training.tracking.events import LOSS, Point, TrackedRun, hyperparameters

NAME = "mlflow"
REMOTE = True

#: MLflow's limits of one request and of a parameter's length.
MAX_METRICS, MAX_PARAMS, LONGEST_PARAM = 1000, 100, 6000
#: MLflow's names of a run's ends.
_ENDS = {State.COMPLETED: "FINISHED", State.FAILED: "FAILED"}
#: MLflow's own patience is minutes; the upload repeats failed requests itself. Its messages go where the rank's other
#: libraries write theirs.
_VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_CONFIGURE_LOGGING": "false",
}

_T = TypeVar("_T")


def destination(tracking: TrackingConfig, run: RunDir) -> str:
    """Experiment, run and address, in words."""
    uri = without_userinfo(tracking_uri(tracking, run))
    return f"experiment {tracking.mlflow.experiment}, run {run.root.name}, at {uri}"


def tracking_uri(tracking: TrackingConfig, run: RunDir) -> str:
    """The server or database: as configured, from MLFLOW_TRACKING_URI, or beside the run folder."""
    uri = tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return uri or f"sqlite:///{run.root.parent / 'mlflow.db'}"


class MlflowTracker:
    """One MLflow run: a new one, or the earlier one with this id.

    Raises:
        mlflow.exceptions.MlflowException: no answer, or a refusal.
    """

    def __init__(self, run: TrackedRun, earlier: str | None = None) -> None:
        for variable, value in _VARIABLES.items():
            os.environ.setdefault(variable, value)
        from mlflow.tracking import MlflowClient

        uri = tracking_uri(run.experiment.tracking, run.folder)
        self._client = MlflowClient(tracking_uri=uri)
        self._params, self._last = hyperparameters(run.experiment), 0
        if earlier is None:
            experiment = _experiment(self._client, run.experiment.tracking.mlflow.experiment)
            tags = {"quantexp.run": run.folder.root.name, "quantexp.attempt": str(run.attempt)}
            info = self._client.create_run(experiment, run_name=run.name, tags=tags).info
        else:
            self._client.update_run(earlier, status="RUNNING")
            known = self._client.get_run(earlier)
            info = known.info
            # MLflow refuses another value of a parameter, which a changed layout has.
            self._params = {k: v for k, v in self._params.items() if k not in known.data.params}
            steps = [each.step for each in self._client.get_metric_history(earlier, LOSS)]
            self._last = max(steps, default=0)
        self.id = str(info.run_id)
        shown = without_userinfo(uri)
        page = f"{shown.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{self.id}"
        self.where = page if shown.startswith("http") else shown

    def log(self, points: Sequence[Point]) -> None:
        """Log metrics with the time of their measurement; before the first, the hyperparameters as parameters.

        MLflow has no histograms.
        """
        from mlflow.entities import Metric, Param

        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in self._params.items()]
        for part in _parts(params, MAX_PARAMS):
            self._client.log_batch(self.id, params=part)
        self._params = {}
        metrics = [
            Metric(tag, value, round(point.time_s * 1000), point.iteration)
            for point in points
            if point.iteration > self._last
            # The loss ends a point: a later process asks for its steps to know what MLflow has.
            for tag, value in sorted(point.scalars.items(), key=lambda item: item[0] == LOSS)
        ]
        for batch in _parts(metrics, MAX_METRICS):
            self._client.log_batch(self.id, metrics=batch)

    def end(self, state: State, reason: str) -> None:
        """End the run as finished, failed or killed, with the reason as a tag."""
        self._client.set_tag(self.id, "quantexp.state", state.value)
        if reason:
            self._client.set_tag(self.id, "quantexp.reason", reason)
        self._client.set_terminated(
            self.id, _ENDS.get(state, "KILLED"), end_time=round(time.time() * 1000)
        )


start = MlflowTracker


def _experiment(client: Any, name: str) -> str:
    """The id of MLflow's experiment, which another run may create at the same time."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def _parts(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part

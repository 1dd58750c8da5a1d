"""`training.start_from=RUN@ITERATION`: starts from a checkpoint of another run, for instance with another scheme.

The run continues with the checkpoint's weights, iteration count, learning-rate schedule and position in the data. The
optimizer starts fresh unless `training.start_optimizer` loads the state that the other run saved
(`checkpoint.optimizer`). The position is meaningful only if both runs order the data in the same way, so the options
that determine the order must be equal. This module does not import torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quantexp.config.load import read
from quantexp.errors import DataError, RunError, UnreadableError
from quantexp.folders import user_path
from quantexp.model.checkpoints import (
    PADDING,
    STATE,
    STATE_INDEX,
    folder_of,
    is_published,
    saved_iterations,
)
from quantexp.runs.find import runs_named, scope
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import read_provenance
from quantexp.schema import Experiment, TrainingConfig
from quantexp.schema.training import run_and_iteration

#: The options that, with the data, determine the tokens of an iteration.
_ORDER = ("seed", "seq_length", "global_batch_size", "iterations")


@dataclass(frozen=True)
class StartPoint:
    """A checkpoint to start from."""

    run: RunDir
    iteration: int

    @property
    def weights(self) -> Path:
        """The folder of the weights."""
        return folder_of(self.run, self.iteration)

    @property
    def state(self) -> Path:
        """The index of the training state; the file may be missing."""
        return self.weights / STATE / STATE_INDEX

    @property
    def is_in_shards(self) -> bool:
        """Whether the weights are in the training state alone (checkpoint.publish=false)."""
        return self.state.is_file() and not is_published(self.weights)

    @property
    def padding(self) -> Path:
        """The rows of the vocabulary's padding; the file is missing if there are none."""
        return self.weights / PADDING

    def state_fingerprint(self) -> str:
        """The sha256 of the state's index, in hex; the index has the hashes of all other files."""
        return hashlib.sha256(self.state.read_bytes()).hexdigest()


def first_iteration(experiment: Experiment, own: StartPoint | None) -> int:
    """The first iteration of a run that goes on from its own checkpoint, or of one that has none, from 1."""
    return experiment.first_iteration if own is None else own.iteration + 1


def start_point(experiment: Experiment) -> StartPoint | None:
    """The checkpoint to start from; None without `training.start_from`.

    Raises:
        DataError: the run, the checkpoint or its optimizer state does not exist, or the data order differs.
    """
    training = experiment.training
    if training.start_from is None:
        return None
    option = f"training.start_from={training.start_from}"
    iteration = run_and_iteration(training.start_from)[1]
    root = user_path(experiment.paths.root).absolute()
    point = StartPoint(started_run(training.start_from, root), iteration)
    if iteration not in (saved := saved_iterations(point.run)):
        has = (
            f"has {', '.join(map(str, saved))}"
            if saved
            else "has none (checkpoint.every=N saves them)"
        )
        raise DataError(
            f"{option}: there is no checkpoint of iteration {iteration}; {point.run.root} {has}"
        )
    if training.start_optimizer:
        other = _training_of(point.run).optimizer
        if other is not training.optimizer:
            raise DataError(
                f"{option} has the state of training.optimizer={other.value}, which {training.optimizer.value} cannot "
                "take: leave out training.start_optimizer"
            )
    if training.start_optimizer and not point.state.is_file():
        raise DataError(
            f"{option}: the checkpoint holds no optimizer; its run needs checkpoint.optimizer=true, or leave out "
            "training.start_optimizer"
        )
    if not experiment.evaluate.only:
        _require_same_order(experiment, point, option)
    return point


def first_weights(experiment: Experiment) -> Path | None:
    """The published weights that a run starts from, a folder or a file in it; None if it draws them.

    Raises:
        DataError: as `start_point`.
    """
    point, given = start_point(experiment), experiment.model.init_from
    if point is not None:
        return point.weights
    return None if given is None else user_path(given)


def started_run(start_from: str, root: Path) -> RunDir:
    """The run that `RUN@ITERATION` names, a path or a part of a name in `root`.

    Raises:
        ConfigError: the text does not have this form.
        DataError: no run has this name, or several do.
    """
    option = f"training.start_from={start_from}"
    name, iteration = run_and_iteration(start_from)
    try:
        runs = scope(name, root).runs
    except RunError as error:
        # The run that starts from it, or evaluates it, may have that part in its name too.
        runs = tuple(run for run in runs_named(name, root) if iteration in saved_iterations(run))
        if len(runs) != 1:
            raise DataError(f"{option}: {error}") from error
    if len(runs) != 1:
        raise DataError(f"{option} must name one run, and names {len(runs)}")
    return RunDir(runs[0].root.absolute())


def _training_of(run: RunDir) -> TrainingConfig:
    """Its `training`, to be read only: many experiments of a design start from one run."""
    file = run.config
    return _training_at(file, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=64)
def _training_at(file: Path, _changed: int) -> TrainingConfig:
    return read(file).training


def _require_same_order(experiment: Experiment, point: StartPoint, option: str) -> None:
    other, training = _training_of(point.run), experiment.training
    for key in _ORDER:
        own_value, other_value = getattr(training, key), getattr(other, key)
        if own_value != other_value:
            raise DataError(
                f"{option} has its place in the data by training.{key}={other_value}; here it is {own_value}, so give "
                "it that"
            )


def recorded_data(point: StartPoint) -> object:
    """The data in the other run's identity.

    Raises:
        DataError: provenance.json has none.
    """
    try:
        return read_provenance(point.run.provenance)["identity"]["data"]
    except (UnreadableError, KeyError) as error:
        raise DataError(f"{point.run.provenance} does not say what data the run had") from error

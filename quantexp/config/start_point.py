"""`training.start_from=RUN@ITERATION`: going on from a checkpoint of another run, under another scheme for instance.

The weights are the checkpoint's, iterations count on from its own, and so do the schedule of the learning rate and the
place in the data; the optimizer begins anew unless `training.start_optimizer` takes the state that the run kept
(`checkpoint.optimizer`). The place means the same only where the data is dealt out alike, so what decides that must be
the other run's. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from quantexp.config.load import read
from quantexp.errors import DataError, RunError
from quantexp.model.checkpoints import PADDING, STATE, folder_of, named, saved_iterations
from quantexp.runs.find import scope
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

#: What decides which tokens an iteration sees, beside the data itself.
_ORDER = ("seed", "seq_length", "global_batch_size", "iterations")
_PIECE = 1 << 20


@dataclass(frozen=True)
class StartPoint:
    """A checkpoint to go on from."""

    run: RunDir
    iteration: int

    @property
    def weights(self) -> Path:
        """Its folder."""
        return folder_of(self.run, self.iteration)

    @property
    def state(self) -> Path:
        """What training goes on with beside the weights; may be missing."""
        return self.weights / STATE

    @property
    def padding(self) -> Path:
        """The rows of the vocabulary's padding; missing where there is none."""
        return self.weights / PADDING

    def state_fingerprint(self) -> str:
        """The sha256, in hex, of the state's file."""
        digest = hashlib.sha256()
        with self.state.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest()


def start_point(experiment: Experiment) -> StartPoint | None:
    """The checkpoint to go on from, whose run dealt out its data as this one does; None where a run begins by itself.

    Raises:
        DataError: no such run or checkpoint, no state of its optimizer, or another order of data.
    """
    training = experiment.training
    if training.start_from is None:
        return None
    given = f"training.start_from={training.start_from}"
    name, iteration = named(training.start_from)
    try:
        runs = scope(name, Path(experiment.paths.root).expanduser().absolute()).runs
    except RunError as error:
        raise DataError(f"{given}: {error}") from error
    if len(runs) != 1:
        raise DataError(f"{given} must name one run, and names {len(runs)}")
    point = StartPoint(RunDir(runs[0].root.absolute()), iteration)
    if iteration not in (saved := saved_iterations(point.run)):
        has = (
            f"has {', '.join(map(str, saved))}"
            if saved
            else "has none (checkpoint.every=N saves them)"
        )
        raise DataError(
            f"{given}: there is no checkpoint of iteration {iteration}; {point.run.root} {has}"
        )
    if training.start_optimizer and not point.state.is_file():
        raise DataError(
            f"{given}: the checkpoint holds no optimizer; its run needs checkpoint.optimizer=true, or leave out "
            "training.start_optimizer"
        )
    _require_same_order(experiment, point, given)
    return point


def _require_same_order(experiment: Experiment, point: StartPoint, given: str) -> None:
    other, training = read(point.run.config).training, experiment.training
    for key in _ORDER:
        ours, theirs = getattr(training, key), getattr(other, key)
        if ours != theirs:
            raise DataError(
                f"{given} has its place in the data by training.{key}={theirs}; here it is {ours}, so give it that"
            )


def recorded_data(point: StartPoint) -> object:
    """What the other run's identity says of its data.

    Raises:
        DataError: it says nothing.
    """
    try:
        return json.loads(point.run.provenance.read_bytes())["identity"]["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{point.run.provenance} does not say what data the run had") from error

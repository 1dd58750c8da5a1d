"""A recorded run again from one of its checkpoints, to be changed and trained for some iterations.

A replay that changes nothing computes the same bits as the run: weights, moments, schedule, place in the data, draws
and amax histories are those of the checkpoint. It captures nothing, saves nothing, and goes on after a step that was
left out, so that it ends at its last iteration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantexp.config.load import read, with_overrides
from quantexp.errors import RunError
from quantexp.launch.recorded import in_place
from quantexp.model.checkpoints import resumable, saved_iterations
from quantexp.quant.rules import as_switched
from quantexp.runs.metrics import read_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import LOOP, read_provenance
from quantexp.schema import (
    CaptureConfig,
    CaptureLevel,
    CheckpointConfig,
    EvaluationConfig,
    Experiment,
    Nonfinite,
    TrackingConfig,
)
from quantexp.schema.training import LARGEST_ITERATION


@dataclass(frozen=True)
class Origin:
    """The run that is replayed, and the checkpoint."""

    run: RunDir
    #: As recorded, with the launcher of the replays.
    experiment: Experiment
    #: The checkpoint's iteration; 0 starts as the run itself did.
    start: int

    @property
    def first(self) -> int:
        """The first iteration that is computed again, from 1."""
        return self.start + 1


def trained_experiment(run: RunDir) -> Experiment:
    """The experiment of a run of quantexp's own loop that trains; conditions of rules became their iterations.

    Raises:
        RunError: the run evaluates, compares gradients, or is of another loop.
        ConfigError: the run's configuration cannot be read.
    """
    require_own_loop(run)
    experiment = in_place(read(run.config), run)
    if experiment.evaluate.only or experiment.gradient.only:
        raise RunError(f"RUN must be a run that trains, and {run.root.name} does not")
    if any(rule.when for rule in experiment.quant.rules):
        experiment.quant = as_switched(experiment.quant, read_metrics(run))
    return experiment


def origin_of(
    run: RunDir,
    experiment: Experiment,
    start: int | None,
    before: int | None,
    overrides: Sequence[str] = (),
) -> Origin:
    """The run with the checkpoint of iteration `start`; None takes the newest one before the iteration `before`.

    `before` None means after the last iteration; `overrides` (`key=value`) change how replays are launched.

    Raises:
        RunError: there is no such checkpoint, or it has no training state.
    """
    name = run.root.name
    own = experiment.first_iteration - 1
    known = [own, *(i for i in resumable(run) if i > own)]
    if start is None:
        end = experiment.training.iterations if before is None else before
        earlier = [i for i in known[1:] if i < end]
        if not earlier:
            raise RunError(
                f"{name} has no checkpoint with a training state before iteration {end} (checkpoint.every=N "
                f"checkpoint.optimizer=true saves them); --from {own} begins as the run did"
            )
        start = earlier[-1]
    elif start not in known:
        if start in saved_iterations(run):
            raise RunError(
                f"--from {start}: the checkpoint has no training state (checkpoint.optimizer=true saves it); there is "
                f"--from {', '.join(map(str, known))}"
            )
        raise RunError(
            f"--from {start}: {name} has no checkpoint of that iteration; there is --from "
            f"{', '.join(map(str, known))}"
        )
    if start >= experiment.training.iterations:
        raise RunError(
            f"--from {start} is the last iteration of {name}: nothing follows that could be replayed"
        )
    return Origin(run, with_overrides(experiment, overrides), start)


def require_own_loop(run: RunDir) -> None:
    """Refuse a run whose training loop is not quantexp's, which therefore cannot be repeated here.

    Raises:
        RunError: names the loop.
        UnreadableError: provenance.json is damaged.
    """
    if (loop := other_loop(run)) is not None:
        raise RunError(
            f"{run.root.name} was trained by {loop}, whose data and checkpoints quantexp does not replay; "
            "RUN must be a run of quantexp's own loop"
        )


def other_loop(run: RunDir) -> str | None:
    """The name of a run's training loop, if it is not quantexp's.

    Raises:
        UnreadableError: provenance.json is damaged.
    """
    if not run.provenance.is_file():
        return None
    identity: Mapping[str, Any] = read_provenance(run.provenance).get("identity", {})
    loop = identity.get(LOOP)
    return None if loop is None else str(loop["name"])


def replayed(origin: Origin, last: int, root: Path, *, chaos: int = 0) -> Experiment:
    """A copy of the run's experiment from the checkpoint up to iteration `last`, in a folder of runs of its own.

    A number `chaos` other than 0 moves last bits of the weights that it starts with, as `training.chaos` does. The
    caller may change more of it, and then validates it.
    """
    experiment = copy.deepcopy(origin.experiment)
    training = experiment.training
    if origin.first != experiment.first_iteration:
        training.start_from, training.start_optimizer = f"{origin.run.root}@{origin.start}", True
        training.chaos = 0  # which has moved the run's first weights, not these
        experiment.model.init_from = None
    training.chaos += chaos
    training.stop_after, training.restart = last, False
    training.nonfinite, training.max_nonfinite_iterations = Nonfinite.skip, LARGEST_ITERATION
    experiment.capture = CaptureConfig("off", CaptureLevel.off)
    experiment.evaluation = EvaluationConfig()
    experiment.checkpoint = CheckpointConfig()
    experiment.tracking = TrackingConfig()
    experiment.analysis.auto = "false"
    experiment.paths = replace(experiment.paths, root=str(root), run=None)
    experiment.force = experiment.dry_run = experiment.launcher.detach = False
    return experiment

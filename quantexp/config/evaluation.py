"""The iterations that evaluate held-out samples, and the checks of their configuration."""

from __future__ import annotations

from dataclasses import asdict

from quantexp.errors import ConfigError
from quantexp.model.layout import Layout
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import read_config
from quantexp.schema import Experiment
from quantexp.schema.limits import check_limits


def check_evaluation(experiment: Experiment) -> None:
    """Refuse an evaluation that never happens, or whose samples cannot be divided among the data-parallel ranks.

    Raises:
        ConfigError: names key, value and bound.
    """
    evaluation, training = experiment.evaluation, experiment.training
    if evaluation.every is None:
        return
    check_limits("evaluation", evaluation)
    layout = Layout.of(experiment)
    divisor = training.micro_batch_size * layout.micro_batches_together
    if evaluation.samples % divisor:
        raise ConfigError(
            f"evaluation.samples must be a multiple of {divisor} (training.micro_batch_size x "
            f"{layout.micro_batches_in_words}), got {evaluation.samples}"
        )


def num_samples(experiment: Experiment) -> int:
    """The number of held-out samples that a run needs."""
    evaluation = experiment.evaluation
    return 0 if evaluation.every is None else evaluation.samples


def is_evaluated(experiment: Experiment, iteration: int) -> bool:
    """Whether the run evaluates held-out samples after this iteration, from 1."""
    every = experiment.evaluation.every
    is_last = iteration == experiment.training.iterations
    return every is not None and (iteration % every == 0 or is_last)


def num_evaluations(experiment: Experiment, first: int) -> int:
    """The number of iterations from `first` to the last for which `is_evaluated` is true, computed in closed form."""
    every, last = experiment.evaluation.every, experiment.training.iterations
    if every is None or first > last:
        return 0
    return last // every - (first - 1) // every + (last % every != 0)


def was_evaluated(experiment: Experiment, run: RunDir) -> bool:
    """Whether a completed run has evaluated the requested held-out samples.

    Raises:
        RunError: the run's configuration cannot be read.
    """
    requested = asdict(experiment.evaluation)
    if requested["every"] is None:
        return True
    return read_config(run).get("evaluation") == requested

"""When held-out samples are looked at, and what is asked of the configuration for it."""

from __future__ import annotations

from dataclasses import asdict

import yaml

from quantexp.errors import ConfigError, RunError
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.schema.ranges import at_least


def check_evaluation(experiment: Experiment) -> None:
    """Refuse an evaluation that never comes, or whose samples the processes cannot share.

    Raises:
        ConfigError: with key, value and bound.
    """
    evaluation, training = experiment.evaluation, experiment.training
    if evaluation.every is None:
        return
    at_least("evaluation.every", evaluation.every, 1)
    at_least("evaluation.samples", evaluation.samples, 1)
    each = training.micro_batch_size * experiment.launcher.num_processes
    if evaluation.samples % each:
        raise ConfigError(
            f"evaluation.samples must be a multiple of {each} (training.micro_batch_size x launcher.num_processes), "
            f"got {evaluation.samples}"
        )


def num_samples(experiment: Experiment) -> int:
    """How many held-out samples a run needs."""
    evaluation = experiment.evaluation
    return 0 if evaluation.every is None else evaluation.samples


def is_evaluated(experiment: Experiment, iteration: int) -> bool:
    """Whether held-out samples are looked at after an iteration, from 1."""
    every = experiment.evaluation.every
    is_last = iteration == experiment.training.iterations
    return every is not None and (iteration % every == 0 or is_last)


def num_evaluations(experiment: Experiment, first: int) -> int:
    """How many iterations from `first` to the last `is_evaluated` names, counted without a look at each."""
    every, last = experiment.evaluation.every, experiment.training.iterations
    if every is None or first > last:
        return 0
    return last // every - (first - 1) // every + (last % every != 0)


def was_evaluated(experiment: Experiment, run: RunDir) -> bool:
    """Whether a completed run looked at the held-out samples that are asked for now.

    Raises:
        RunError: its configuration cannot be read.
    """
    asked = asdict(experiment.evaluation)
    if asked["every"] is None:
        return True
    try:
        content = yaml.safe_load(run.config.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"{run.config} cannot be read: {error}") from error
    return isinstance(content, dict) and content.get("evaluation") == asked

"""Replays of a run from one of its checkpoints: its own configuration, with more of its slots in bf16.

`quantexp.launch.replays` says what a replay takes up. Replays lie in a folder of their own, `bisect/<run>/` beside the
run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from quantexp.config.in_force import maps_between, name_in_force, sites_in_force
from quantexp.config.load import from_plain, plain
from quantexp.errors import RunError
from quantexp.launch import replays
from quantexp.launch.replays import Origin, replayed, trained_experiment
from quantexp.quant.precision import PrecisionMap
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment, GradientConfig, Rule

#: Below the folder of runs.
FOLDER = "bisect"


def folder_of(origin: Origin) -> Path:
    """The folder of a run's replays."""
    return origin.run.root.parent / FOLDER / origin.run.root.name


def origin_of(
    run: RunDir, start: int | None, before: int | None, overrides: Sequence[str] = ()
) -> Origin:
    """The run with a checkpoint, as `quantexp.launch.replays.origin_of`.

    Raises:
        RunError: there is no such checkpoint, or it has no training state; the run evaluates, or quantises nothing.
        ConfigError: the run's configuration cannot be read.
    """
    experiment = trained_experiment(run)
    if not sites_in_force(experiment):
        raise RunError(
            f"RUN must quantise slots of matrix products, and {run.root.name} has all of them in bf16"
        )
    return replays.origin_of(run, experiment, start, before, overrides)


def declared_of(origin: Origin, last: int) -> list[PrecisionMap]:
    """The precision maps of the replayed iterations, up to `last`."""
    return maps_between(origin.experiment, origin.first, last)


def replay(origin: Origin, last: int, rules: Sequence[Rule] = (), *, chaos: int = 0) -> Experiment:
    """The run from the checkpoint up to iteration `last`, with these rules after its own; `chaos` as of `replayed`.

    Raises:
        ConfigError: the rules and the run's other keys contradict each other.
    """
    experiment = replayed(origin, last, folder_of(origin), chaos=chaos)
    quant = experiment.quant
    if rules:
        quant.rules = [*quant.rules, *map(copy.copy, rules)]
        quant.name = None
        quant.name = name_in_force(experiment, sites_in_force(experiment))
    return from_plain(plain(experiment))


def gradient_of(origin: Origin, by: Sequence[str], rules: Sequence[Rule] = ()) -> Experiment:
    """The run that compares gradients of the first replayed iteration.

    Raises:
        ConfigError: as `replay`.
    """
    experiment = replay(origin, origin.first, rules)
    experiment.gradient = GradientConfig(True, list(by))
    return from_plain(plain(experiment))

"""`quantexp evaluate RUN@ITERATION`: takes model and data from the run whose weights are evaluated.

The run's model and dataset become Hydra choices, so that overrides of their keys apply as to any choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from quantexp.config.start_point import started_run
from quantexp.errors import ConfigError
from quantexp.folders import quoted
from quantexp.model.checkpoints import saved_iterations
from quantexp.runs.find import find_run
from quantexp.runs.recorded_config import read_config

#: Keys of a group that its other keys have decided, or that name other weights.
_DECIDED = {"model": ("from_hf", "init_from"), "dataset": ("label",)}
#: The keys of the training that a forward pass of the same weights has.
_TRAINING = ("seq_length", "micro_batch_size", "precision")


def from_run(run: str, given: Sequence[str], root: Path) -> list[str]:
    """The overrides for the weights `RUN@ITERATION` of a run in `root`, without keys that are given.

    The held-out samples are those of the run, if it evaluated any while it trained.

    Raises:
        ConfigError: there is no iteration, or a preset is given, which would change the model.
        DataError, RunError: no such run.
    """
    if "@" not in run:
        saved = saved_iterations(find_run(run, root))
        remedy = f"write {run}@{saved[-1]}" if saved else "the run has none (checkpoint.every=N)"
        raise ConfigError(f"{run} needs the iteration of a checkpoint, RUN@ITERATION: {remedy}")
    keys = {word.lstrip("+").partition("=")[0] for word in given}
    if "training" in keys:
        raise ConfigError(
            f"{run} has its own model and data, which a preset would cut: drop training="
        )
    config = read_config(started_run(run, root))
    words = {"training.start_from": quoted(run)}
    words |= {group: _choice(group, config[group]) for group in _DECIDED}
    words |= {f"training.{key}": str(config["training"][key]) for key in _TRAINING}
    if config["evaluation"]["every"] is not None:
        words["evaluation.samples"] = str(config["evaluation"]["samples"])
    return [f"{key}={value}" for key, value in words.items() if key not in keys]


def _choice(group: str, section: dict[str, Any]) -> str:
    """Store a section of a run as a choice of its group; returns the choice's name."""
    node = {key: value for key, value in section.items() if key not in _DECIDED[group]}
    choice = f"of_run_{sha256(repr(node).encode()).hexdigest()[:16]}"
    ConfigStore.instance().store(group=group, name=choice, node=node)
    return choice

"""Checkpoints of a run: at which iterations, where, how large. Nothing here imports torch.

    checkpoints/iteration_00000100/     model.safetensors (or shards with an index), config.json
                                        padding.safetensors, where Megatron pads the vocabulary
                                        training_state.pt, with checkpoint.optimizer

Each holds the weights as models are published, so that it can be begun with (`model.init_from`), exported and looked at
with any tool. A folder is written beside its place and renamed: one that has its name is whole.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

from quantexp.errors import ConfigError, RunError
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.sizes import element_bytes
from quantexp.runs.paths import RunDir
from quantexp.schema import CheckpointConfig, Experiment
from quantexp.schema.ranges import at_least

#: The optimizer's state, where it is kept, in a checkpoint's folder.
STATE = "training_state.pt"
#: The rows of the vocabulary's padding, which are trained too and are no part of a published model.
PADDING = "padding.safetensors"
_NAME = re.compile(r"iteration_(\d{8})")


def iterations_saved(checkpoint: CheckpointConfig, iterations: int) -> list[int]:
    """The iterations after which a run that goes to its end saves its model."""
    every = checkpoint.every
    saved = list(range(every, iterations + 1, every)) if every is not None else []
    if checkpoint.at_end and iterations not in saved:
        saved.append(iterations)
    return saved


def check_checkpoint(checkpoint: CheckpointConfig, iterations: int) -> None:
    """Refuse intervals that save nothing.

    Raises:
        ConfigError: with key, value and bound.
    """
    if checkpoint.every is None:
        if checkpoint.optimizer and not checkpoint.at_end:
            raise ConfigError(
                "checkpoint.optimizer needs checkpoints to be kept in: checkpoint.every=N or checkpoint.at_end=true"
            )
        return
    at_least("checkpoint.every", checkpoint.every, 1)
    if checkpoint.every > iterations:
        raise ConfigError(
            f"checkpoint.every must be at most training.iterations={iterations}, got {checkpoint.every}; "
            "checkpoint.at_end=true saves the last iteration's"
        )


def folder_of(run: RunDir, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return run.checkpoints / f"iteration_{iteration:08d}"


def saved_iterations(run: RunDir) -> list[int]:
    """The iterations whose checkpoints are there, whole."""
    if not run.checkpoints.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in run.checkpoints.iterdir())
    return sorted(int(name[1]) for name in names if name is not None)


def checkpoint_bytes(experiment: Experiment) -> int:
    """What one checkpoint takes, without its small files and the padding of the vocabulary."""
    shapes = published(mapping(experiment.model)).values()
    each = size = element_bytes(experiment.training)
    if (
        experiment.checkpoint.optimizer
    ):  # two moments; where the weights are of 16 bits, them in fp32 too
        each += 8 if size == 4 else 12
    return sum(math.prod(shape) for shape in shapes) * each


def require_room(experiment: Experiment, root: Path) -> None:
    """Refuse a run whose checkpoints are more than what is free where they are to go.

    Raises:
        RunError: with what they take, what is free, and what to change.
    """
    number = len(iterations_saved(experiment.checkpoint, experiment.training.iterations))
    taken = number * checkpoint_bytes(experiment)
    free = shutil.disk_usage(root).free
    if taken > free:
        raise RunError(
            f"{number} checkpoints would take {taken / 1e9:.3g} GB, and {root} has {free / 1e9:.3g} GB free; raise "
            "checkpoint.every, or set paths.root to another disk"
        )


def named(text: str) -> tuple[str, int]:
    """The run and the iteration that `training.start_from` names.

    Raises:
        ConfigError: it does not have this form.
    """
    run, at, iteration = text.rpartition("@")
    if not (run and at and iteration.isdecimal() and int(iteration) > 0):
        raise ConfigError(f"training.start_from must be RUN@ITERATION, got {text!r}")
    return run, int(iteration)


def first_iteration(experiment: Experiment) -> int:
    """The first iteration that a run takes, from 1."""
    start = experiment.training.start_from
    return 1 if start is None else named(start)[1] + 1


def check_start(experiment: Experiment) -> None:
    """Refuse keys that contradict one another.

    Raises:
        ConfigError: naming them.
    """
    training = experiment.training
    if training.start_from is None:
        if training.start_optimizer:
            raise ConfigError("training.start_optimizer needs training.start_from=RUN@ITERATION")
        return
    if experiment.model.init_from is not None:
        raise ConfigError(
            f"training.start_from={training.start_from} and model.init_from={experiment.model.init_from} both give the "
            "first weights; drop one of them"
        )
    if (first := first_iteration(experiment)) > training.iterations:
        raise ConfigError(
            f"training.start_from={training.start_from} begins with iteration {first}, and training.iterations is "
            f"{training.iterations}"
        )

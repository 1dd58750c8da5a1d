"""Checkpoints of a run: their iterations, folders and sizes, and the removal of old ones. Imports no torch.

    checkpoints/iteration_00000100/     model.safetensors (or shards with an index), unless checkpoint.publish=false
                                        padding.safetensors beside it, where Megatron pads the vocabulary
                                        config.json
                                        state/, with checkpoint.optimizer (`quantexp.model.training_state`)
                                        hashes.json (`quantexp.model.checkpoint_hashes`)

With the weights in the published form, runs can start from it (`model.init_from`), `export` can copy it, and any tool
can read it; without it, `export` makes them from state/. A folder is written under a temporary name and renamed
(`quantexp.model.checkpoint_writer`): a folder with the final name is complete. It is renamed to a hidden name before
its files are removed. What a kill leaves under a hidden name is removed with the next one.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from quantexp.errors import DataError, RunError
from quantexp.folders import existing, sync
from quantexp.model.huggingface import INDEX, SINGLE
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.sizes import element_bytes, num_linear_parameters, num_matrix_parameters
from quantexp.runs.paths import RunDir
from quantexp.schema import CheckpointConfig, Experiment

#: The folder of the training state in a checkpoint's folder, if it is saved, and its index.
STATE, STATE_INDEX = "state", "state.json"
#: The padding rows of the vocabulary, which are trained too but are not part of a published model.
PADDING = "padding.safetensors"
_NAME = re.compile(r"iteration_(\d{8})")


def iterations_saved(checkpoint: CheckpointConfig, iterations: int) -> list[int]:
    """The iterations after which a complete run saves its model."""
    every = checkpoint.every
    saved = list(range(every, iterations + 1, every)) if every is not None else []
    if checkpoint.at_end and iterations not in saved:
        saved.append(iterations)
    return saved


def is_saved(checkpoint: CheckpointConfig, iteration: int, last: bool) -> bool:
    """Whether a checkpoint is written after an iteration."""
    is_due = checkpoint.every is not None and iteration % checkpoint.every == 0
    return is_due or (checkpoint.at_end and last)


def kept(checkpoint: CheckpointConfig, saved: Sequence[int]) -> list[int]:
    """Those of the saved iterations, in ascending order, whose checkpoints stay.

    The newest `checkpoint.keep_last`, and multiples of `checkpoint.keep_every`; all without `keep_last`.
    """
    if checkpoint.keep_last is None:
        return list(saved)
    newest, every = set(saved[-checkpoint.keep_last :]), checkpoint.keep_every
    return [i for i in saved if i in newest or (every is not None and i % every == 0)]


def most_at_once(checkpoint: CheckpointConfig, saved: Sequence[int]) -> int:
    """The largest number of checkpoints that are there at once: one is removed only after the next one is whole."""
    return len(kept(checkpoint, saved[:-1])) + 1 if saved else 0


def folder_of(run: RunDir, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return run.checkpoints / f"iteration_{iteration:08d}"


def saved_iterations(run: RunDir) -> list[int]:
    """The iterations with a complete checkpoint."""
    if not run.checkpoints.is_dir():
        return []
    return sorted(filter(None, map(iteration_of, run.checkpoints.iterdir())))


def resumable(run: RunDir) -> list[int]:
    """The iterations whose checkpoint has the training state, ascending; they are not checked."""
    return [
        iteration
        for iteration in saved_iterations(run)
        if (folder_of(run, iteration) / STATE / STATE_INDEX).is_file()
    ]


def next_iteration(run: RunDir) -> int:
    """The iteration at which a run goes on if its newest checkpoint is undamaged; 1 without a checkpoint."""
    return max(resumable(run), default=0) + 1


def iteration_of(folder: Path) -> int | None:
    """The iteration of a complete checkpoint's folder, from 1; None for any other path."""
    name = _NAME.fullmatch(folder.name)
    return None if name is None else int(name[1])


def is_published(folder: Path) -> bool:
    """Whether a checkpoint has the published form."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def require_published(path: Path, option: str) -> None:
    """Refuse a checkpoint without the published form.

    Raises:
        DataError: names the option that gave its path, and the command that makes the form.
    """
    iteration = iteration_of(path)
    if iteration is None or not (path / STATE).is_dir() or is_published(path):
        return
    run = path.absolute().parents[1]
    raise DataError(
        f"{option} is a checkpoint without published weights (checkpoint.publish=false): give the folder that quantexp "
        f"export {run} format=hf iteration={iteration} writes"
    )


def checkpoint_bytes(experiment: Experiment) -> int:
    """Bytes of one checkpoint, without its small files and the padding of the vocabulary."""
    shapes, checkpoint = published(mapping(experiment.model)).values(), experiment.checkpoint
    per_element, matrices = element_bytes(experiment.training) if checkpoint.publish else 0, 0
    if checkpoint.optimizer:  # main weights and two moments in fp32, of Muon's matrices one
        per_element += 12
        matrices = num_matrix_parameters(experiment)
        matrices -= _kept(experiment) * num_linear_parameters(experiment.model)
    return sum(math.prod(shape) for shape in shapes) * per_element - 4 * matrices


def _kept(experiment: Experiment) -> int:
    """The tensors besides that a scheme keeps of linear weights, at most."""
    from quantexp.model.training_state import KEPT  # with numpy

    state = experiment.quant.optimizer
    return sum(len(kinds) for key, kinds in KEPT.items() if getattr(state, key).format is not None)


def checkpoints_at_once(experiment: Experiment) -> int:
    """The largest number of a run's checkpoints that are there at once."""
    checkpoint = experiment.checkpoint
    saved = iterations_saved(checkpoint, experiment.training.last_iteration)
    return most_at_once(checkpoint, saved)


def require_room(experiment: Experiment, root: Path) -> None:
    """Refuse a run whose checkpoints exceed the free space of their disk.

    Raises:
        RunError: names the required and the free space, and a remedy.
    """
    number = checkpoints_at_once(experiment)
    required = number * checkpoint_bytes(experiment)
    if (
        not experiment.checkpoint.optimizer
    ):  # the shards, until the published form is made from them
        required += min(number, 1) * checkpoint_bytes(experiment)
    free = shutil.disk_usage(existing(root)).free
    if required > free:
        raise RunError(
            f"{number} checkpoints would take {required / 1e9:.3g} GB, and {root} has {free / 1e9:.3g} GB free; raise "
            "checkpoint.every, set checkpoint.keep_last=N, or set paths.root to another disk"
        )


#: The first character of a folder that is being written or removed, and the suffix of the latter.
HIDDEN, REMOVED = ".", ".removed"


def remove_others(run: RunDir, checkpoint: CheckpointConfig, iteration: int) -> None:
    """Remove the checkpoints before an iteration, whose own is whole, that do not stay.

    Raises:
        OSError: one cannot be removed.
    """
    for leftover in run.checkpoints.glob(f"{HIDDEN}*{REMOVED}"):
        shutil.rmtree(leftover)
    saved = [each for each in saved_iterations(run) if each <= iteration]
    for each in sorted(set(saved) - set(kept(checkpoint, saved))):
        remove(folder_of(run, each))


def remove(folder: Path) -> None:
    """Remove a checkpoint.

    Raises:
        OSError: it cannot be renamed or removed.
    """
    hidden = folder.with_name(f"{HIDDEN}{folder.name}{REMOVED}")
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)
    sync(folder.parent)
    shutil.rmtree(hidden)

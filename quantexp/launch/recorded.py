"""The experiment as a run folder records it in config.yaml."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

from quantexp.errors import ConfigError, RunError, UnreadableError
from quantexp.folders import require_text, user_path
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import is_same_folder, moved, read_config
from quantexp.schema import CaptureLevel, Code, Experiment
from quantexp.schema.training import run_and_iteration

#: The keys that hold paths: section -> keys.
_PATHS = {
    "paths": ("root", "cache"),
    "model": ("from_hf", "init_from"),
    "dataset": ("path", "tokenizer_path"),
    "capture": ("dir",),
    "evaluate": ("task_folder",),
}


def recorded(experiment: Experiment) -> Experiment:
    """The experiment for config.yaml: without the words that are about one start only."""
    copied = with_absolute_paths(experiment)
    copied.training.restart, copied.code = False, Code.recorded
    return copied


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """A copy of the experiment whose paths are absolute, so that they do not depend on the working directory."""
    copied = copy.deepcopy(experiment)
    for section, key, path in _paths(copied):
        setattr(getattr(copied, section), key, str(user_path(path).absolute()))
    if copied.training.start_from is not None:
        name, iteration = run_and_iteration(copied.training.start_from)
        if (run := user_path(name)).exists():
            copied.training.start_from = f"{run.absolute()}@{iteration}"
    return copied


def _paths(experiment: Experiment) -> Iterator[tuple[str, str, str]]:
    """The paths of an experiment, each after the section and the key that hold it."""
    for section, keys in _PATHS.items():
        values = ((section, key, getattr(getattr(experiment, section), key)) for key in keys)
        yield from (each for each in values if each[2] is not None)


def root_of(experiment: Experiment) -> Path:
    """The folder that holds the run folders.

    Raises:
        ConfigError: its path, or another one that config.yaml will have, cannot be given to the processes of a run.
    """
    root = user_path(experiment.paths.root).absolute()
    paths = [*_paths(experiment), ("paths", "run", str(root / (experiment.paths.run or "")))]
    for section, key, path in paths:
        require_text(f"{section}.{key}", user_path(path), ConfigError)
    if os.pathsep in str(root):
        raise ConfigError(
            f"paths.root must not hold {os.pathsep!r}, which divides the search path of Python, got {str(root)!r}; "
            "choose another folder"
        )
    return root


def in_place(experiment: Experiment, run: RunDir) -> Experiment:
    """A recorded experiment as that of the folder it lies in, which may have been moved or copied since.

    `paths.root` is then the present folder of runs, and every path that was moved or copied with it leads there.
    """
    recorded_root, root = experiment.paths.root, run.root.parent
    if is_same_folder(user_path(recorded_root).absolute(), root):
        return experiment
    copied = copy.deepcopy(experiment)
    for section, key, path in _paths(copied):
        setattr(getattr(copied, section), key, moved(path, recorded_root, root))
    copied.paths.root = str(root)
    if copied.training.start_from is not None:
        name, iteration = run_and_iteration(copied.training.start_from)
        copied.training.start_from = f"{moved(name, recorded_root, root)}@{iteration}"
    return copied


def require_own_captures(experiment: Experiment, run: RunDir) -> None:
    """Refuse to start a copy of a run that would write into the captured tensors of the original.

    A run whose config.yaml is damaged does not say where it was.

    Raises:
        RunError: names both.
    """
    capture = experiment.capture
    try:
        recorded_root = read_config(run).get("paths", {}).get("root")
    except UnreadableError:
        return
    if recorded_root is None or capture.dir is None or capture.level is CaptureLevel.off:
        return
    original = RunDir(user_path(recorded_root).absolute() / run.root.name)
    is_copy = original.config.is_file() and not is_same_folder(original.root, run.root)
    if is_copy and original.captured(capture.dir).is_dir():
        raise RunError(
            f"{run.root} is a copy of {original.root}, whose captured tensors are in {original.captured(capture.dir)}; "
            "start it anew with another capture.dir, or delete the original"
        )

"""The tasks of `quantexp evaluate`: those of lm-evaluation-harness, and files of the user's."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.data.tokenizers.load import COMPANIONS
from quantexp.errors import ConfigError
from quantexp.folders import user_path
from quantexp.model.huggingface import CONFIG
from quantexp.schema import DatasetConfig, EvaluateConfig, Experiment

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE = "lm_eval"
#: The packages of the extra, by which tasks are read and their texts become tokens.
PACKAGES = (PACKAGE, "transformers")
#: The last one names the tokenizer's class if no other file does.
_TOKENIZER_FILES = ("tokenizer.json", *COMPANIONS, CONFIG)
#: Similar names in a message.
_MOST_SIMILAR = 3


def tasks_of(words: Iterable[str]) -> list[str]:
    """The words with `tasks=a,b` as the list `evaluate.tasks=[a,b]`; commas elsewhere are a sweep."""
    short = "tasks="
    return [
        f"evaluate.tasks=[{word.removeprefix(short)}]"
        if word.startswith(short) and not word.startswith(f"{short}[")
        else f"evaluate.{word}"
        if word.startswith(short)
        else word
        for word in words
    ]


def check_tasks(experiment: Experiment) -> None:
    """Refuse the tasks of an experiment if they cannot run, whatever their names.

    Raises:
        ConfigError: several processes; the package is missing; the folder is none.
    """
    evaluate = experiment.evaluate
    if (number := experiment.launcher.num_processes) > 1:
        raise ConfigError(
            f"evaluate.tasks run in one process, got launcher.num_processes={number}; drop the tasks, or evaluate "
            "in one process"
        )
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"evaluate.tasks needs the package {package}, which is not installed; pip install 'quantexp[lm-eval]'"
            )
    if evaluate.task_folder is not None and not user_path(evaluate.task_folder).is_dir():
        raise ConfigError(
            f"evaluate.task_folder must be a folder with task files, got {evaluate.task_folder}; correct the path"
        )


def check_task_names(evaluate: EvaluateConfig) -> None:
    """Refuse names of no task, group or tag.

    Raises:
        ConfigError: names the first, and similar ones.
    """
    known = task_manager(evaluate).all_tasks
    for name in evaluate.tasks:
        if name in known:
            continue
        similar = difflib.get_close_matches(name, known, _MOST_SIMILAR)
        hint = f"; did you mean {', '.join(similar)}?" if similar else ""
        place = f" nor in {evaluate.task_folder}" if evaluate.task_folder else ""
        raise ConfigError(f"evaluate.tasks: there is no task {name} in {PACKAGE}{place}{hint}")


def task_manager(evaluate: EvaluateConfig) -> TaskManager:
    """The harness's index of tasks.

    Its own 15,000 tasks take some 10 s to read, so they are read only if the user's folder lacks a name.
    """
    return _manager(tuple(evaluate.tasks), evaluate.task_folder)


@lru_cache(maxsize=4)
def _manager(names: tuple[str, ...], folder: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is None:
        return TaskManager()
    own = TaskManager(include_path=str(user_path(folder)), include_defaults=False)
    if set(names) <= set(own.all_tasks):
        return own
    return TaskManager(include_path=str(user_path(folder)))


def tokenizer_files(dataset: DatasetConfig) -> list[Path]:
    """The files with which transformers turns texts into tokens; empty for the byte tokenizer."""
    if dataset.tokenizer_path is None:
        return []
    path = user_path(dataset.tokenizer_path)
    folder = path if path.is_dir() else path.parent
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def task_files(evaluate: EvaluateConfig) -> list[Path]:
    """The files of the user's folder, whose content is part of a run's identity, in the order of their names."""
    if evaluate.task_folder is None:
        return []
    folder = user_path(evaluate.task_folder)
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.relative_to(folder).parts
    )

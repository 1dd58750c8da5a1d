"""Reads config.yaml, as any version of quantexp may have written it, without making an experiment of it.

The paths in it are absolute. Where the folder of runs was moved or copied since, `moved` leads them to its new place.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from quantexp.errors import UnreadableError
from quantexp.folders import user_path
from quantexp.reading.files import read_text
from quantexp.reading.typed import WrongTypeError, check_known
from quantexp.reading.yaml_files import MOST_BYTES, yaml_of
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

#: The reason of a run whose configuration was deleted: no command can use it.
GONE = "broken: its config.yaml is gone; restore it, or delete the folder"
#: The section `model` and all lines below it that do not begin another one.
_MODEL = re.compile(r"^model:.*(?:\n(?![^\s#]).*)*", re.MULTILINE)


def read_config(run: RunDir) -> dict[str, Any]:
    """config.yaml as plain values, whose types are those of the schema; empty without the file.

    Keys that another version has more or less are left alone.

    Raises:
        UnreadableError: names the file, and the line or the key.
    """
    try:
        text = read_text(run.config, MOST_BYTES)
    except FileNotFoundError:
        return {}
    return _config_of(text, run)


def model_text(run: RunDir) -> str:
    """The text of the section `model` in config.yaml, which many runs have in common.

    A file in which the section does not begin a line is returned whole.

    Raises:
        UnreadableError: the file is gone, empty, or cannot be read.
    """
    try:
        text = read_text(run.config, MOST_BYTES)
    except FileNotFoundError as error:
        raise UnreadableError(GONE) from error
    if not text.strip():
        raise UnreadableError(f"{run.config} is empty")
    section = _MODEL.search(text)
    return section[0] if section else text


def model_section(text: str, run: RunDir) -> Any:
    """The values of a `model_text`; empty if it has none.

    Raises:
        UnreadableError: as `read_config`; lines are those of config.yaml.
    """
    try:
        config = _config_of(text, run)
    except UnreadableError:
        config = read_config(run)  # which counts the lines from the file's start
    return config.get("model") or {}


def _config_of(text: str, run: RunDir) -> dict[str, Any]:
    config = yaml_of(text, run.config)
    try:
        check_known(config, Experiment)
    except WrongTypeError as error:
        raise UnreadableError(f"{run.config}: {error}") from error
    return config


def moved(path: str, recorded_root: str, root: Path) -> str:
    """A recorded path where it is now.

    What the recorded folder of runs and the present one differ in is what was moved or copied: a path below it that
    exists in the new place is taken there. Any other path is returned as it is.

    Args:
        path: an absolute path.
        recorded_root: `paths.root` of the same configuration.
        root: the folder of runs in which the run is now.
    """
    old, new = user_path(recorded_root).absolute(), root.absolute()
    if is_same_folder(old, new):
        return path
    while old.name and old.name == new.name:
        old, new = old.parent, new.parent
    if not user_path(path).is_relative_to(old):
        return path
    there = new / user_path(path).relative_to(old)
    return str(there) if os.path.lexists(there) else path


def is_same_folder(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder, which need not exist if they are the same path."""
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False


def does_only(run: RunDir, group: str) -> bool:
    """Whether `GROUP.only` replaces training; a run whose config.yaml cannot be read trains."""
    try:
        section = read_config(run).get(group)
    except UnreadableError:
        return False
    return isinstance(section, dict) and bool(section.get("only"))

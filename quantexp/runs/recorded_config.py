"""Reads config.yaml, as any version of quantexp may have written it, without making an experiment of it."""

from __future__ import annotations

from typing import Any

from quantexp.errors import UnreadableError
from quantexp.reading.typed import WrongTypeError, check_known
from quantexp.reading.yaml_files import read_yaml
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment


def read_config(run: RunDir) -> dict[str, Any]:
    """config.yaml as plain values, whose types are those of the schema; empty without the file.

    Keys that another version has more or less are left alone.

    Raises:
        UnreadableError: names the file, and the line or the key.
    """
    try:
        config = read_yaml(run.config)
        check_known(config, Experiment)
    except FileNotFoundError:
        return {}
    except WrongTypeError as error:
        raise UnreadableError(f"{run.config}: {error}") from error
    return config


def does_only(run: RunDir, group: str) -> bool:
    """Whether `GROUP.only` replaces training; a run whose config.yaml cannot be read trains."""
    try:
        section = read_config(run).get(group)
    except UnreadableError:
        return False
    return isinstance(section, dict) and bool(section.get("only"))

"""Explicit points: a YAML list of mappings from override to value, each one variant of a sweep.

Values are literal: a comma, a quote or a bracket in a string is part of the string and never a sweep; `${...}` refers
to the configuration, as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString, Transformer
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quantexp.config.sweep.axes import Axis, Variant, bare
from quantexp.config.yaml_files import check_yaml
from quantexp.errors import ConfigError

_FORM = "a list of mappings such as `- {quant: FA_mxfp8, training.lr: 1.0e-4}`"


def listed(file: Path, swept: list[str]) -> Axis:
    """The variants of a file, in order; `swept` are the keys that the command line sweeps.

    Raises:
        ConfigError: names a file that cannot be read or is not a list of mappings, or the number of an entry with a
            key that the command line sets too.
    """
    entries = _entries(file)
    if not entries:
        raise ConfigError(f"{file}: no points; write {_FORM}")
    return [_variant(f"{file}, entry {n}", entry, swept) for n, entry in enumerate(entries, 1)]


def _entries(file: Path) -> list[Any]:
    try:
        check_yaml(file)
        content = OmegaConf.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"sweep.points: there is no file {file}") from error
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, ListConfig):
        raise ConfigError(f"{file} must be {_FORM}")
    entries = OmegaConf.to_container(content)
    assert isinstance(entries, list)
    return entries


def _variant(where: str, entry: Any, swept: list[str]) -> Variant:
    if not isinstance(entry, dict) or not entry:
        raise ConfigError(f"{where} must be a mapping of overrides to values, got {entry!r}")
    for key in map(str, entry):
        if bare(key).startswith(("hydra.", "hydra/", "sweep.")):
            raise ConfigError(f"{where}: {key} is one for the whole sweep; give it beside the file")
        if bare(key) in map(bare, swept):
            raise ConfigError(f"{where}: {key} is on the command line too; give it in one place")
    return {str(key): word(str(key), value) for key, value in entry.items()}


def word(key: str, value: Any) -> str:
    """The override that sets a key to exactly this value, with any special characters quoted."""
    return f"{key}={Transformer.str(_literal(value))}"


def _literal(value: Any) -> Any:
    if isinstance(value, str):
        return QuotedString(value, Quote.single)
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    return value

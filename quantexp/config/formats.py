"""Fills in the definitions of the number formats that a scheme names, so that a run's configuration holds them.

A name is looked for in the scheme's own `quant.formats`, then in the `format` folders of the user and of quantexp. A
run reads its definitions from its configuration alone, and no later change of a file changes the run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quantexp.config.choices import require_folder
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir
from quantexp.formats.definitions.definition import canonical
from quantexp.formats.definitions.files import FOLDER, read_format, shipped_formats
from quantexp.formats.definitions.python import PYTHON, is_python, python_definition
from quantexp.formats.table import BY_ANY_NAME
from quantexp.schema import QuantConfig

_PROVIDER = "file://"


def fill_formats(quant: QuantConfig, others: Sequence[str | None], folders: list[Path]) -> None:
    """Add the definition of every format that a slot, a rule or one of the other names selects.

    Args:
        quant: the scheme, which is changed.
        others: names besides those of the slots, such as that of `capture.format`.
        folders: the user's configuration folders.

    Raises:
        ConfigError: a file's definition is wrong; or a scheme defines a shipped name as something else.
    """
    for name, content in quant.formats.items():
        shipped = shipped_formats().get(str(name))
        if shipped and isinstance(content, dict) and canonical(content) != shipped.definition:
            raise ConfigError(
                f"quant.formats.{name} has the name of a shipped format and another definition; give it another name"
            )
    for name in sorted({*_names(quant), *filter(None, others)}):
        if name in BY_ANY_NAME or name in quant.formats:
            continue
        if (definition := _definition(name, folders)) is not None:
            quant.formats[name] = json.loads(definition)
    for name, content in quant.formats.items():
        if isinstance(content, dict) and PYTHON in content:
            quant.formats[name] = _with_digest(name, content)


def definitions(names: str | None, config_dir: Path | None) -> dict[str, str]:
    """The definitions, as JSON by name, of those of some comma-separated names that files of the user declare.

    Raises:
        ConfigError: a file's definition is wrong, or the folder is not there.
    """
    require_folder(config_dir)
    folders = [] if config_dir is None else [config_dir]
    scheme = QuantConfig()
    fill_formats(scheme, (names or "").split(","), folders)
    return {name: canonical(content) for name, content in scheme.formats.items()}


def user_folders(config: DictConfig) -> list[Path]:
    """The user's configuration folders of a composed configuration."""
    return folders_of(OmegaConf.select(config, "hydra.searchpath") or [])


def folders_of(words: Iterable[str]) -> list[Path]:
    """The folders of a search path of Hydra's."""
    return [Path(w.removeprefix(_PROVIDER)) for w in words if w.startswith(_PROVIDER)]


def _with_digest(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """The definition of a Python format with the digest of its source as it is now."""
    word = content[PYTHON]
    if not isinstance(word, str) or not is_python(word):
        return content  # refused where it is read
    try:
        return content | python_definition(word)
    except ValueError as error:
        raise ConfigError(f"quant.formats.{name}: {error}") from error


def _definition(name: str, folders: list[Path]) -> str | None:
    if is_python(name):
        return json.dumps({PYTHON: name})
    for folder in (*folders, conf_dir()):
        file = folder / FOLDER / f"{name}.yaml"
        if "/" in name or not file.is_file():
            continue
        try:
            definition = read_format(file).definition
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        shipped = shipped_formats().get(name)
        if shipped is not None and definition != shipped.definition:
            raise ConfigError(
                f"{file} has the name of a shipped format and another definition; rename the file"
            )
        return definition
    return None


def _names(node: Any) -> Iterator[str]:
    """The values of every `format` key of a scheme."""
    if isinstance(node, list):
        for one in node:
            yield from _names(one)
    elif dataclasses.is_dataclass(node):
        for each in dataclasses.fields(node):
            value = getattr(node, each.name)
            if each.name == "format" and isinstance(value, str):
                yield value
            elif each.name != "formats":
                yield from _names(value)

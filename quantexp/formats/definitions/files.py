"""Declared formats by name: those of a configuration, of the shipped files, and of recorded runs. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quantexp.folders import conf_dir
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.python import is_python, python_definition
from quantexp.formats.table import BY_ANY_NAME
from quantexp.formats.types import Format
from quantexp.reading.yaml_files import read_yaml, repeated_key

#: The folder of declared formats in a configuration folder.
FOLDER = "format"
#: Names of formats.
NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
#: Words that mean something else where a format is named.
RESERVED = ("high", "reuse", "null", "none", "true", "false")
#: Declared formats of records that this process has read, by name.
_recorded: dict[str, Format] = {}


def declared_by_name(name: str, declared: Mapping[str, Format]) -> Format:
    """The format of that name that is none of the table; see `quantexp.formats.get_format`.

    Raises:
        ValueError: no format has that name.
    """
    for formats in (declared, shipped_formats(), _recorded):
        if name in formats:
            return formats[name]
    if is_python(name):
        return declared_format(name, python_definition(name))
    allowed = ", ".join(sorted(known_names(declared)))
    raise ValueError(f"unknown number format {name!r}: must be one of {allowed}")


def known_names(declared: Mapping[str, Format] | None = None) -> set[str]:
    """Every name and alias that `get_format` finds."""
    return {*BY_ANY_NAME, *(declared or {}), *shipped_formats()}


def format_of_record(record: Mapping[str, Any]) -> Format:
    """The format of a recorded operand (`quantexp.quant.records.spec_record`): its own definition, if it has one.

    Raises:
        ValueError: no format has that name, or the definition is none of this version.
    """
    name, definition = str(record.get("format")), record.get("definition")
    if definition is not None:
        return declared_format(name, json.loads(definition))
    return BY_ANY_NAME[name] if name in BY_ANY_NAME else declared_by_name(name, {})


def know_format(record: Mapping[str, Any]) -> None:
    """Make a recorded format known by its name in this process, for what is said about captures.

    Raises:
        ValueError: as `format_of_record`; or a record before has another definition of the name.
    """
    fmt = format_of_record(record)
    if fmt.definition and _recorded.setdefault(fmt.name, fmt) != fmt:
        raise ValueError(
            f"the format {fmt.name} is not the same in all of these records; look at runs with one definition at a time"
        )


@cache
def shipped_formats() -> dict[str, Format]:
    """The formats of the shipped files, by name."""
    return formats_in(conf_dir() / FOLDER)


def formats_in(folder: Path) -> dict[str, Format]:
    """The formats that the files of a folder declare, by name; empty if there is no such folder.

    Raises:
        ValueError: names the file, and what is wrong with it.
    """
    return {file.stem: read_format(file) for file in sorted(folder.glob("*.yaml"))}


def _wrong_name(name: str) -> str:
    if name in BY_ANY_NAME or name in RESERVED:
        return "has the name of a format of quantexp"
    if not NAME.fullmatch(name):
        return "must be named with 1 to 64 letters, digits and underscores"
    return ""


def read_format(file: Path) -> Format:
    """The format that a file declares; its name is the file's.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names the file, and what is wrong with it.
    """
    content = read_yaml(file)
    if problem := _wrong_name(file.stem):
        raise ValueError(f"{file} {problem}; give the file another name")
    if (key := repeated_key(file)) is not None:
        raise ValueError(f"{file}: {key} is there twice; drop one")
    try:
        return declared_format(file.stem, content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error

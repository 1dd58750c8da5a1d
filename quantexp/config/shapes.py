"""Finds the value of a YAML file that is no list, or no mapping, where the schema has one.

OmegaConf refuses such a file and names no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

import yaml

from quantexp.schema import Composition
from quantexp.schema.keys import is_mapping, kind_of, section_of

LIST, MAPPING = "must be a list, in brackets", "must be keys with values, in braces"


def wrong_shape(file: Path, group: str) -> str | None:
    """The message for the first such value of a file of a group (`quant`, `quant/linear`); None without one."""
    text = file.read_text(encoding="utf-8-sig")
    owner: Any = Composition
    parents: list[str] = []
    for part in [] if "# @package _global_" in text else group.split("/"):
        if (section := section_of(owner, part)) is not None:
            owner, parents = section, [*parents, part]
    values = yaml.safe_load(text)
    return _wrong(values, owner, parents) if isinstance(values, dict) else f"it {MAPPING}"


def _wrong(values: Mapping[str, Any], owner: Any, parents: list[str]) -> str | None:
    for name, value in values.items():
        path = [*parents, str(name)]
        key, section = ".".join(path), section_of(owner, str(name))
        if get_origin(kind_of(key)) is list and isinstance(value, Mapping):
            return f"{key} {LIST}"
        if section is None and not is_mapping(owner, str(name)):
            continue
        if value is not None and not isinstance(value, Mapping):
            return f"{key} {MAPPING}"
        if section and value and (wrong := _wrong(value, section, path)):
            return wrong
    return None

"""The full keys of the configuration, as a person types them: `training.lr`."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

from quantexp.schema.experiment import Composition


def section_of(owner: Any, name: str) -> Any:
    """The dataclass type of a field of a dataclass; None if the field is not a section."""
    hint = get_type_hints(owner).get(name)
    kinds = [kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)]
    return kinds[0] if kinds and get_origin(hint) is not list else None


def keys(owner: Any = Composition, parent: str = "") -> list[str]:
    """The full keys of a section and its subsections; keys within lists are not included."""
    result = []
    for field in dataclasses.fields(owner):
        section = section_of(owner, field.name)
        key = f"{parent}{field.name}"
        result += keys(section, f"{key}.") if section else [key]
    return result

"""Limits of single keys, declared with the field that they limit, and the loop that checks them.

A limit is a predicate and its words: `lr: float = limited(3e-4, POSITIVE)`. None always passes. The limits of a list or
dictionary apply to each of its elements. A rule that involves several keys is code, in the validation of its section.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from quantexp.errors import ConfigError

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Limit:
    """What one value must satisfy."""

    holds: Callable[[Any], bool]
    #: The predicate in words, after the key: `must be a positive number`.
    requirement: str

    def check(self, key: str, value: Any) -> None:
        """Refuse a value outside the limit.

        Raises:
            ConfigError: names key, limit and value.
        """
        if not self.holds(value):
            shown = repr(value) if isinstance(value, str) else value
            raise ConfigError(f"{key} {self.requirement}, got {shown}")


def at_least(least: int) -> Limit:
    """No number below the minimum."""
    return Limit(lambda value: value >= least, f"must be at least {least}")


#: Neither infinite nor NaN, as NOT_NEGATIVE.
POSITIVE = Limit(lambda value: 0 < value < math.inf, "must be a positive number")
NOT_NEGATIVE = Limit(lambda value: 0 <= value < math.inf, "must be a number of at least 0")
FOLDER_NAME = Limit(
    lambda text: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+~-]*", text) is not None,
    "must be letters, digits and . _ + ~ - (it names a folder)",
)


def limits(*declared: Limit) -> dict[str, tuple[Limit, ...]]:
    """The metadata of a dataclass field with limits."""
    return {"limits": declared}


def limited(default: _T, *declared: Limit) -> _T:
    """A dataclass field with a default and limits."""
    return dataclasses.field(default=default, metadata=limits(*declared))


def check_limits(key: str, section: Any) -> None:
    """Check the limits of a section of the configuration, its subsections and the elements of its lists.

    Args:
        key: the section's full key, such as `model`.
        section: a dataclass.

    Raises:
        ConfigError: names the first invalid key.
    """
    for field in dataclasses.fields(section):
        for name, item in _items(f"{key}.{field.name}", getattr(section, field.name)):
            for limit in field.metadata.get("limits", ()):
                limit.check(name, item)
            if dataclasses.is_dataclass(item):
                check_limits(name, item)


def _items(key: str, value: Any) -> list[tuple[str, Any]]:
    """The values of a field with their full keys."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", item) for name, item in value.items()]
    if isinstance(value, list):
        return [
            (f"{key}[{index}]" if dataclasses.is_dataclass(item) else key, item)
            for index, item in enumerate(value)
        ]
    return [] if value is None else [(key, value)]

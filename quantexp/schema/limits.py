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
#: OmegaConf's marker of a required value; importing OmegaConf is slower than the whole schema.
MISSING: Any = "???"


@dataclasses.dataclass(frozen=True)
class Limit:
    """What one value must satisfy."""

    holds: Callable[[Any], bool]
    #: The predicate in words, after the key: `must be a positive number`.
    requirement: str
    #: The largest number, for the message about a larger one; None if `requirement` names it.
    most: float | None = None

    def check(self, key: str, value: Any) -> None:
        """Refuse a value outside the limit.

        Raises:
            ConfigError: names key, limit and value.
        """
        if not self.holds(value):
            shown = repr(value) if isinstance(value, str) else value
            too_large = self.most is not None and self.most < value < math.inf
            requirement = f"must be at most {self.most:g}" if too_large else self.requirement
            raise ConfigError(f"{key} {requirement}, got {shown}")


def at_least(least: int) -> Limit:
    """No number below the minimum."""
    return Limit(lambda value: value >= least, f"must be at least {least}")


def at_most(most: int) -> Limit:
    """No number above the maximum, and no NaN."""
    return Limit(lambda value: value <= most, f"must be at most {most:,}")


def between(least: int, most: int) -> tuple[Limit, Limit]:
    """A number of a range that includes both: the bounds of a size, far above any that is of use."""
    return at_least(least), at_most(most)


#: The factor of `pre_scale`.
FACTOR = Limit(
    lambda value: isinstance(value, bool) or 0.75 <= value < 1,
    "must be true, false or a number of at least 0.75 and below 1",
)


#: The power of the gradient estimator `dge`, and the factor `max_factor` of a maximum of attention's scores.
ABOVE_ONE = Limit(lambda value: 1 < value <= 64, "must be above 1 and at most 64")


def next_multiple(number: int, divisor: int) -> int:
    """The smallest multiple of a positive divisor that is not below a number: what a refusal proposes instead of it."""
    return -(-number // divisor) * divisor


#: The largest finite fp32 number, rounded down: training computes in fp32, where a larger one is infinite.
_LARGEST = 3.0e38
#: fp32's smallest normal number, rounded up: a smaller one may be zero there.
_SMALLEST = 1.2e-38
#: Neither infinite nor NaN, in fp32 either, as NOT_NEGATIVE.
POSITIVE = Limit(
    lambda value: _SMALLEST <= value <= _LARGEST, "must be a positive number", most=_LARGEST
)
NOT_NEGATIVE = Limit(
    lambda value: value == 0 or _SMALLEST <= value <= _LARGEST,
    "must be a number of at least 0",
    most=_LARGEST,
)
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

"""Matches points against the patterns of `sweep.exclude` and `sweep.first`.

A pattern's keys are groups (`model`, `quant/linear`), compared with the choice, or keys of the configuration
(`training.lr`), compared with their value. A text is a shell pattern; any other value must be equal. `quant` is
compared with the scheme's derived name, so `quant: bf16` does not match `quant=bf16 quant/qk=mxfp8`. A pattern that
matches no point is probably a typo, and an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quantexp.config.compose import scheme_name
from quantexp.config.sweep.request import Pattern
from quantexp.errors import ConfigError
from quantexp.quant.scheme import derived_name
from quantexp.schema import QuantConfig


@dataclass
class Selection:
    """Patterns and their matches so far."""

    #: The key that holds the patterns.
    where: str
    patterns: list[Pattern]
    #: Indices of the patterns that matched a point.
    used: set[int] = field(default_factory=set)
    #: Key -> the values it was compared with.
    compared: dict[str, dict[str, None]] = field(default_factory=dict)

    def takes(self, config: DictConfig) -> bool:
        """Whether a composed point, valid or not, matches one of the patterns.

        Raises:
            ConfigError: a key names a section of the configuration instead of a value.
        """
        matching = [i for i, pattern in enumerate(self.patterns) if self._matches(config, pattern)]
        self.used.update(matching)
        return bool(matching)

    def check(self, num_points: int) -> None:
        """Refuse patterns that matched no point.

        Raises:
            ConfigError: names the pattern, and the missing key or the values that exist.
        """
        for index, pattern in enumerate(self.patterns):
            if index not in self.used:
                reasons = "; ".join(self._reason(key) for key in pattern)
                raise ConfigError(
                    f"{self.where}: {pattern} matches no point (of {num_points}); {reasons}"
                )

    def _matches(self, config: DictConfig, pattern: Pattern) -> bool:
        fits = [self._fits(config, key, expected) for key, expected in pattern.items()]
        return all(fits)

    def _fits(self, config: DictConfig, key: str, expected: Any) -> bool:
        values = _values(config, key)
        if any(OmegaConf.is_config(value) for value in values):
            raise ConfigError(f"{self.where}: {key} is a section; name a key in it")
        self.compared.setdefault(key, {}).update(dict.fromkeys(map(_text, values)))
        return any(_equal(value, expected) for value in values)

    def _reason(self, key: str) -> str:
        values = self.compared.get(key)
        if not values:
            return (
                f"there is no {key}: neither a group that is chosen nor a key of the configuration"
            )
        return f"{key} is {', '.join(values)}"


def _values(config: DictConfig, key: str) -> list[Any]:
    """The values of a point for a key: none for a missing key, several names for a scheme in a folder."""
    choices = config.hydra.runtime.choices
    if key == "quant":
        return _scheme_names(config, str(choices[key]))
    if key in choices:
        return [choices[key]]
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(config, parent) if parent else config
    exists = isinstance(section, DictConfig) and name in section
    return [section[name]] if exists else []


def _scheme_names(config: DictConfig, choice: str) -> list[str]:
    """The scheme's name, and the choice if it is that name in a folder; only the choice for an invalid scheme."""
    try:
        scheme = OmegaConf.to_object(config.quant)
        assert isinstance(scheme, QuantConfig)
        name = scheme_name(scheme, derived_name(scheme), config.hydra)
    except ConfigError:
        return [choice]
    return [name, choice] if choice.rpartition("/")[2] == name else [name]


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, str):
        return fnmatchcase(_text(value), expected)
    are_numbers = _is_number(value) and _is_number(expected)
    return _text(value) == _text(expected) or (are_numbers and value == expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """A value as typed on the command line."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)

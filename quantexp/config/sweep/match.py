"""Which points the patterns of `sweep.exclude` and `sweep.first` mean.

A pattern's keys are groups (`model`, `quant/linear`), held against what is chosen, or keys of the configuration
(`training.lr`), held against their values. A text is a shell pattern, anything else must be equal. `quant` is held
against the scheme's true name, so that `quant: bf16` does not mean `quant=bf16 quant/qk=mxfp8`. A pattern that means
no point is a typo and refused.
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
from quantexp.schema import QuantConfig


@dataclass
class Selection:
    """Patterns, and what they have met so far."""

    #: The key they were given under.
    where: str
    patterns: list[Pattern]
    #: Indices of the patterns that matched a point.
    used: set[int] = field(default_factory=set)
    #: Key -> the values it was held against.
    seen: dict[str, dict[str, None]] = field(default_factory=dict)

    def takes(self, config: DictConfig) -> bool:
        """Whether a composed point, valid or not, matches one of the patterns.

        Raises:
            ConfigError: a key that names a section of the configuration, not a value.
        """
        matching = [i for i, pattern in enumerate(self.patterns) if self._matches(config, pattern)]
        self.used.update(matching)
        return bool(matching)

    def check(self, num_points: int) -> None:
        """Refuse patterns that matched none of the points.

        Raises:
            ConfigError: naming the pattern, and a key that does not exist or the values that there are.
        """
        for index, pattern in enumerate(self.patterns):
            if index not in self.used:
                reasons = "; ".join(self._reason(key) for key in pattern)
                raise ConfigError(
                    f"{self.where}: {pattern} matches no point (of {num_points}); {reasons}"
                )

    def _matches(self, config: DictConfig, pattern: Pattern) -> bool:
        fits = [self._fits(config, key, wanted) for key, wanted in pattern.items()]
        return all(fits)

    def _fits(self, config: DictConfig, key: str, wanted: Any) -> bool:
        values = _values(config, key)
        if any(OmegaConf.is_config(value) for value in values):
            raise ConfigError(f"{self.where}: {key} is a section; name a key in it")
        self.seen.setdefault(key, {}).update(dict.fromkeys(map(_text, values)))
        return any(_equal(value, wanted) for value in values)

    def _reason(self, key: str) -> str:
        values = self.seen.get(key)
        if not values:
            return (
                f"there is no {key}: neither a group that is chosen nor a key of the configuration"
            )
        return f"{key} is {', '.join(values)}"


def _values(config: DictConfig, key: str) -> list[Any]:
    """What a point has for a key: nothing for one that does not exist, several names for a scheme in a folder."""
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
    """The true name, and the choice where it is that name in a folder; of a scheme that cannot be, the choice."""
    try:
        scheme = OmegaConf.to_object(config.quant)
        assert isinstance(scheme, QuantConfig)
        name = scheme_name(scheme, config.hydra)
    except ConfigError:
        return [choice]
    return [name, choice] if choice.rpartition("/")[2] == name else [name]


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return fnmatchcase(_text(value), wanted)
    both = _is_number(value) and _is_number(wanted)
    return _text(value) == _text(wanted) or (both and value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)

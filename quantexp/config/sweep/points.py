"""The points of a multirun: expanded, composed and validated, all of them before the first one runs.

    words (a=x,y  b=glob(*)  c=range(1,4)), hydra.sweeper.params and sweep.* of the configuration
      -> explicit points x axes of the words, some zipped x seeds          (`variants`)
      -> compose each -> drop the excluded -> validate -> merge equal points -> sort by stage

Hydra's BasicSweeper splits several values and forms their product. The order is that of nested loops, with the last
override fastest. `sweep.*` holds for the whole sweep, and no resolved point contains it.

The keys of a pattern of `sweep.exclude` and `sweep.first` are groups (`model`, `quant/linear`), compared with the
choice, or keys of the configuration (`training.lr`), compared with their value. A text is a shell pattern; any other
value must be equal. `quant` is compared with the scheme's derived name, so `quant: bf16` does not match
`quant=bf16 quant/qk=mxfp8`. A pattern that matches no point is probably a typo, and an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quantexp.config.compose import composed, configuration, finished, scheme_name
from quantexp.config.composition_errors import clean_errors
from quantexp.config.overrides import numbers_as_typed, readable
from quantexp.config.sweep.request import Pattern
from quantexp.config.sweep.variants import Expansion, expand, sweep_section
from quantexp.errors import ConfigError
from quantexp.quant.scheme import derived_name
from quantexp.schema import Experiment, QuantConfig


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    #: The point's overrides: `compose(overrides, config_dir, {})` gives the same experiment.
    overrides: list[str]
    experiment: Experiment
    #: 0 for points that match `sweep.first`, 1 for points that wait for all of stage 0; without `sweep.first` always 0.
    stage: int = 0
    #: The overrides of other points that resolve to the same experiment.
    merged: list[list[str]] = field(default_factory=list)


def compose_points(
    words: list[str],
    config_dir: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Point]:
    """Every point of a multirun, validated; stage 0 before stage 1.

    Raises:
        ConfigError: a point is not an experiment, a key of `sweep` is invalid or matches no point, or no point is left.
    """
    words = readable(words)
    with numbers_as_typed(words), configuration(config_dir) as extra:
        expansion = expand(words, extra, environment)
        exclude = Selection("sweep.exclude", expansion.request.exclude)
        first = Selection("sweep.first", expansion.request.first)
        points: dict[str, Point] = {}
        for index, variant in enumerate(expansion.variants):
            with _naming(expansion, index), clean_errors(config_dir):
                config = composed([*extra, *variant])
                _refuse_another_sweep(config, expansion)
                if not exclude.takes(config):
                    stage = 0 if not first.patterns or first.takes(config) else 1
                    _add(points, Point([*variant, *expansion.resets], finished(config), stage))
    exclude.check(len(expansion.variants))
    if not points:
        raise ConfigError(f"sweep.exclude leaves no point (of {len(expansion.variants)})")
    first.check(len(points))
    return sorted(points.values(), key=lambda point: point.stage)


def merged_lines(points: Sequence[Point]) -> list[str]:
    """A message for each point that equals an earlier one and does not run by itself."""
    return [_merged_line(point.overrides, other) for point in points for other in point.merged]


def _merged_line(*overrides: list[str]) -> str:
    kept, other = ([w for w in words if not w.startswith("sweep.")] for words in overrides)
    only_other = [word for word in other if word not in kept]
    only_kept = [word for word in kept if word not in other]
    if not only_other and not only_kept:
        return f"{' '.join(kept) or 'the point'} is there more than once: it runs once"
    same = f"{' '.join(only_other) or 'the point without it'} is the same experiment as "
    return f"{same}{' '.join(only_kept) or 'the point without it'}: it runs once"


def _add(points: dict[str, Point], point: Point) -> None:
    """Add a point, or merge it into an equal one."""
    key = repr(point.experiment)
    same = points.get(key)
    if same is None:
        points[key] = point
    else:
        merged = [*same.merged, point.overrides]
        points[key] = replace(same, stage=min(same.stage, point.stage), merged=merged)


def _refuse_another_sweep(config: DictConfig, expansion: Expansion) -> None:
    """Refuse a swept choice that defines a sweep itself, which would be obeyed only in part."""
    if sweep_section(config) != expansion.shared:
        raise ConfigError(
            "its files say something else about `sweep` than those of the whole sweep; what is swept cannot set "
            "`sweep` itself"
        )


@contextlib.contextmanager
def _naming(expansion: Expansion, index: int) -> Iterator[None]:
    """Add to an error its point, and its entry in the file of explicit points."""
    try:
        yield
    except ConfigError as error:
        words = " ".join(expansion.varied(index))
        number = index // expansion.points_per_entry + 1  # beyond the file's for a baseline
        where = f"{expansion.request.points}, entry {number}: " if expansion.request.points else ""
        raise ConfigError(f"{where}{error}{f' (point {words})' if words else ''}") from error


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

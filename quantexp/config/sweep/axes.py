"""The axes of a sweep in the order of the command line; some may advance together.

A variant is a set of overrides by key; an axis is a list of variants, of which every point takes one. Hydra itself
splits an override with several values (choices, ranges, globs, quotes).
"""

from __future__ import annotations

from decimal import Decimal
from math import ceil, isfinite

from hydra.core.override_parser.types import Glob, Override, RangeSweep

from quantexp.config.hydra_internals import BasicSweeper
from quantexp.errors import ConfigError

#: Key, with its `+` or `~` -> the whole override.
Variant = dict[str, str]
Axis = list[Variant]


#: The most points of a sweep.
MOST_POINTS = 10_000


def bare(key: str) -> str:
    """A key without its `+` or `~`."""
    return key.lstrip("+~")


def axes(overrides: list[Override]) -> dict[str, Axis]:
    """Key -> its axis; the last override of a key counts, at the position of the first.

    Raises:
        ConfigError: an override has no values or is an interval, or sweeps one of Hydra's own keys.
    """
    axis_of: dict[str, Axis] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override() and bare(key).startswith(("hydra.", "hydra/", "sweep.")):
            raise ConfigError(f"{override.input_line}: {key} is one for the whole sweep")
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line} has no values to run; write them out, or {key}=range(first,end,step)"
            )
        _count(override)
        ((*jobs,),) = BasicSweeper.split_arguments([override], None)
        if not jobs:
            raise ConfigError(f"{override.input_line} stands for no value{_options(override)}")
        axis_of[key] = [{key: word} for (word,) in jobs]
    return axis_of


def _count(override: Override) -> None:
    """Refuse a range of more values than a sweep may have points, before it is enumerated."""
    value = override.value()
    if isinstance(value, RangeSweep):
        assert value.start is not None
        assert value.stop is not None
        if not all(map(isfinite, (value.start, value.stop, value.step))):
            raise ConfigError(f"{override.input_line} must have finite ends and a finite step")
        if not value.step:
            raise ConfigError(f"{override.input_line} must have a step other than 0")
        check_count(ceil((Decimal(value.stop) - Decimal(value.start)) / Decimal(value.step)))


def check_count(num_points: int) -> None:
    """Refuse a sweep of more points than can be composed before the first one starts.

    Raises:
        ConfigError: names the number.
    """
    if num_points > MOST_POINTS:
        raise ConfigError(
            f"a sweep must have at most {MOST_POINTS:,} points, got {num_points:,}; give fewer values, or run several "
            "sweeps"
        )


def _options(override: Override) -> str:
    if not isinstance(override.value(), Glob):
        return ""
    loader = override.config_loader
    assert loader is not None
    options = loader.get_group_options(override.key_or_group)
    if not options:
        return f": there is no group {override.key_or_group}"
    return f"; available: {', '.join(options)}"


def zipped(axis_of: dict[str, Axis], groups: list[list[str]]) -> list[Axis]:
    """The axes, with those of each group merged into one axis at the position of the first.

    Raises:
        ConfigError: a key is not swept or is in two groups, or the axes of a group differ in length.
    """
    together: dict[str, list[str]] = {}
    for keys in _checked(axis_of, groups):
        together.update(dict.fromkeys(keys, keys))
    done: set[str] = set()
    merged = []
    for key in axis_of:
        if key not in done:
            keys = together.get(key, [key])
            done.update(keys)
            merged.append(_merge({key: axis_of[key] for key in keys}))
    return merged


def _checked(axis_of: dict[str, Axis], groups: list[list[str]]) -> list[list[str]]:
    """The groups, as keys of the axes."""
    swept = {bare(key): key for key, axis in axis_of.items() if len(axis) > 1}
    names = [name for group in groups for name in group]
    for name in names:
        if name not in swept:
            known = ", ".join(swept) or "none"
            raise ConfigError(f"sweep.zip: {name} is not swept; swept keys: {known}")
        if names.count(name) > 1:
            raise ConfigError(f"sweep.zip: {name} is there twice; name each key once")
    return [[swept[name] for name in group] for group in groups]


def _merge(axis_of: dict[str, Axis]) -> Axis:
    """Merge axes of equal length into one."""
    first, *others = axis_of
    for other in others:
        if len(axis_of[other]) != len(axis_of[first]):
            raise ConfigError(
                f"sweep.zip: {bare(first)} has {len(axis_of[first])} values and {bare(other)} has "
                f"{len(axis_of[other])}; keys that advance together need equally many"
            )
    return [
        {key: word for variant in step for key, word in variant.items()}
        for step in zip(*axis_of.values(), strict=True)
    ]

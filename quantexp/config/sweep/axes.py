"""The axes of a sweep, what is varied, in the order of the command line; some may advance together.

A variant is a set of overrides by key; an axis is a list of variants, of which every point takes one. How a word with
several values falls apart (choices, ranges, globs, quotes) is Hydra's own doing.
"""

from __future__ import annotations

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Glob, Override

from quantexp.errors import ConfigError

#: Key, with its `+` or `~`, -> the whole override.
Variant = dict[str, str]
Axis = list[Variant]


def bare(key: str) -> str:
    """A key without the marks that add or delete it."""
    return key.lstrip("+~")


def axes(overrides: list[Override]) -> dict[str, Axis]:
    """The axis of every key; of a key that is given twice the last word counts, in the place of the first.

    Raises:
        ConfigError: a word that stands for no value at all or for an interval; a key of Hydra's own that is swept.
    """
    found: dict[str, Axis] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override() and bare(key).startswith(("hydra.", "hydra/", "sweep.")):
            raise ConfigError(f"{override.input_line}: {key} is one for the whole sweep")
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line} has no values to run; write them out, or {key}=range(first,end,step)"
            )
        ((*jobs,),) = BasicSweeper.split_arguments([override], None)
        if not jobs:
            raise ConfigError(f"{override.input_line} stands for no value{_options(override)}")
        found[key] = [{key: word} for (word,) in jobs]
    return found


def _options(override: Override) -> str:
    if not isinstance(override.value(), Glob):
        return ""
    loader = override.config_loader
    assert loader is not None
    options = loader.get_group_options(override.key_or_group)
    if not options:
        return f": there is no group {override.key_or_group}"
    return f"; available: {', '.join(options)}"


def zipped(found: dict[str, Axis], groups: list[list[str]]) -> list[Axis]:
    """The axes; those of a group are one that advances in all its keys, in the place of its first.

    Raises:
        ConfigError: a key that is not swept, or in two groups; axes of a group that differ in length.
    """
    together: dict[str, list[str]] = {}
    for keys in _checked(found, groups):
        together.update(dict.fromkeys(keys, keys))
    done: set[str] = set()
    merged = []
    for key in found:
        if key not in done:
            keys = together.get(key, [key])
            done.update(keys)
            merged.append(_advancing({key: found[key] for key in keys}))
    return merged


def _checked(found: dict[str, Axis], groups: list[list[str]]) -> list[list[str]]:
    """The groups, by the keys of the axes."""
    swept = {bare(key): key for key, axis in found.items() if len(axis) > 1}
    names = [name for group in groups for name in group]
    for name in names:
        if name not in swept:
            known = ", ".join(swept) or "none"
            raise ConfigError(f"sweep.zip: {name} is not swept; swept keys: {known}")
        if names.count(name) > 1:
            raise ConfigError(f"sweep.zip: {name} is there twice; name each key once")
    return [[swept[name] for name in group] for group in groups]


def _advancing(found: dict[str, Axis]) -> Axis:
    """One axis of several that are equally long."""
    first, *others = found
    for other in others:
        if len(found[other]) != len(found[first]):
            raise ConfigError(
                f"sweep.zip: {bare(first)} has {len(found[first])} values and {bare(other)} has "
                f"{len(found[other])}; keys that advance together need equally many"
            )
    return [
        {key: word for variant in step for key, word in variant.items()}
        for step in zip(*found.values(), strict=True)
    ]

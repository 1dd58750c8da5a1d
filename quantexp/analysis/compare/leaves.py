"""Flattens nested values to dotted keys, and tells in which of them configurations differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """A key with different values in two runs; None also stands for a missing key."""

    key: str
    baseline: Any
    here: Any


def leaves(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing(here: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Difference]:
    """The leaves that differ, in the order of the baseline."""
    mine, other = leaves(here), leaves(baseline)
    keys = dict.fromkeys([*other, *mine])
    return [
        Difference(key, other.get(key), mine.get(key))
        for key in keys
        if mine.get(key) != other.get(key)
    ]


def distinguishing(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each flat configuration the options that differ: a section's choice (`training=fast`) or a key (`seed=2`)."""
    keys = dict.fromkeys(key for config in configs for key in config)
    shown = [key for key in keys if _distinguishes(key, configs)]
    return [[f"{_short(key)}={config.get(key)}" for key in shown] for config in configs]


def _distinguishes(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key differs between runs with the same choice of its section; different choices imply the rest."""
    choice = f"{key.partition('.')[0]}.name"
    by_choice: dict[Any, set[str]] = {}
    for config in configs:
        same = None if key == choice else config.get(choice)
        by_choice.setdefault(same, set()).add(str(config.get(key)))
    return any(len(values) > 1 for values in by_choice.values())


def _short(key: str) -> str:
    section, _, name = key.partition(".")
    return section if name == "name" else key.rpartition(".")[2]

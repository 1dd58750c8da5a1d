"""Flattens nested values to dotted keys, and compares them."""

from __future__ import annotations

from collections.abc import Mapping
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

"""The options `sweep.*`, validated and normalised.

A user may write one pattern or several, one group of keys or several, a number of seeds or a list of seeds; here all
of them are lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.config.sweep.axes import check_count
from quantexp.errors import ConfigError
from quantexp.folders import user_path
from quantexp.schema import SweepConfig

#: Key -> a shell pattern, or a value that must be equal.
Pattern = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The options of a sweep."""

    #: Groups of keys that advance together.
    zip: list[list[str]]
    #: The file of explicit points.
    points: Path | None
    #: Points that match one of these are excluded.
    exclude: list[Pattern]
    #: None keeps the seed of each point.
    seeds: list[int] | None
    #: Points that match one of these run before all others.
    first: list[Pattern]
    #: Perturbed bf16 runs for each seed beside the bf16 run; None adds neither.
    chaos: int | None = None


def request(config: SweepConfig, seed: int) -> Request:
    """The options of a sweep; a number of seeds starts at `seed`.

    Raises:
        ConfigError: a key has an invalid form.
    """
    points = None if config.points is None else user_path(config.points)
    return Request(
        zip=_groups(config.zip),
        points=points,
        exclude=_patterns("sweep.exclude", config.exclude),
        seeds=_seeds(config.seeds, seed),
        first=_patterns("sweep.first", config.first),
        chaos=_chaos(config.chaos),
    )


def _groups(value: Any) -> list[list[str]]:
    groups = value if _is_list_of(list, value) else [] if value is None else [value]
    for group in groups:
        if not _is_list_of(str, group) or len(group) < 2:
            raise ConfigError(
                "sweep.zip must be a list of two or more swept keys that advance together, or several such lists, "
                f"got {value!r}"
            )
    return [list(group) for group in groups]


def _patterns(key: str, value: Any) -> list[Pattern]:
    patterns = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_pattern, patterns)):
        raise ConfigError(
            f"{key} must be a mapping of keys to shell patterns such as {{quant: 'FA_*'}}, or a list of such mappings, "
            f"got {value!r}"
        )
    return [{str(key): value for key, value in pattern.items()} for pattern in patterns]


def _is_pattern(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and not any(isinstance(wanted, dict | list) for wanted in value.values())
    )


def _seeds(value: Any, seed: int) -> list[int] | None:
    if value is None:
        return None
    if _is_whole(value) and value >= 1:
        check_count(value)
        return list(range(seed, seed + value))
    ok = _is_list_of(int, value) and all(_is_whole(s) and s >= 0 for s in value)
    if not ok or len(set(value)) != len(value):
        raise ConfigError(
            "sweep.seeds must be how many (at least 1), or a list of different seeds (whole numbers of at least 0), "
            f"got {value!r}"
        )
    return list(value)


def _chaos(value: Any) -> int | None:
    if value is not None and not (_is_whole(value) and value >= 0):
        raise ConfigError(
            f"sweep.chaos must be a number of perturbed bf16 runs for each seed, at least 0, got {value!r}"
        )
    number: int | None = value
    check_count(number or 0)
    return number


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)

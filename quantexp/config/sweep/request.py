"""What `sweep.*` asks for, in one shape each, checked.

A person may write one pattern or several, one group of keys or several, a number of seeds or a list of them; here all
are lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.errors import ConfigError
from quantexp.schema import SweepConfig

#: Key -> a shell pattern, or a value to equal.
Pattern = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """How the points are made of the words."""

    #: Groups of keys that advance together.
    zip: list[list[str]]
    #: The file of explicit points.
    points: Path | None
    #: A point that matches one of these is left out.
    exclude: list[Pattern]
    #: None: each point has the seed it has.
    seeds: list[int] | None
    #: A point that matches one of these runs before all others.
    first: list[Pattern]


def request(config: SweepConfig, seed: int) -> Request:
    """The request; `seed` is where a number of seeds begins.

    Raises:
        ConfigError: a shape that a key cannot have.
    """
    points = None if config.points is None else Path(config.points).expanduser()
    return Request(
        zip=_groups(config.zip),
        points=points,
        exclude=_patterns("sweep.exclude", config.exclude),
        seeds=_seeds(config.seeds, seed),
        first=_patterns("sweep.first", config.first),
    )


def _groups(given: Any) -> list[list[str]]:
    groups = given if _is_list_of(list, given) else [] if given is None else [given]
    for group in groups:
        if not _is_list_of(str, group) or len(group) < 2:
            raise ConfigError(
                "sweep.zip must be a list of two or more swept keys that advance together, or several such lists, "
                f"got {given!r}"
            )
    return [list(group) for group in groups]


def _patterns(key: str, given: Any) -> list[Pattern]:
    patterns = given if isinstance(given, list) else [] if given is None else [given]
    if not all(map(_is_pattern, patterns)):
        raise ConfigError(
            f"{key} must be a mapping of keys to shell patterns such as {{quant: 'FA_*'}}, or a list of such mappings, "
            f"got {given!r}"
        )
    return [{str(key): value for key, value in pattern.items()} for pattern in patterns]


def _is_pattern(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and not any(isinstance(wanted, dict | list) for wanted in value.values())
    )


def _seeds(given: Any, seed: int) -> list[int] | None:
    if given is None:
        return None
    if _is_whole(given) and given >= 1:
        return list(range(seed, seed + given))
    ok = _is_list_of(int, given) and all(_is_whole(s) and s >= 0 for s in given)
    if not ok or len(set(given)) != len(given):
        raise ConfigError(
            "sweep.seeds must be how many (at least 1), or a list of different seeds (whole numbers of at least 0), "
            f"got {given!r}"
        )
    return list(given)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)

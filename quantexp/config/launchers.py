"""Finds launchers by their kind, and checks what a configuration asks of them.

A launcher is a class that an installed package names in the entry point group `quantexp.launchers`. The check runs when
an experiment is composed, not when a rank reads it: a container need not have the launcher's package.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from quantexp.errors import ConfigError
from quantexp.schema import LauncherConfig
from quantexp.terminal.close_matches import did_you_mean, near

GROUP = "quantexp.launchers"
_Options = TypeVar("_Options")


def kinds() -> dict[str, EntryPoint]:
    """The entry points of the launchers by their kinds."""
    return {point.name: point for point in entry_points(group=GROUP)}


@cache
def load_launcher(kind: str) -> Any:
    """The launcher of a kind: an instance of the class that its entry point names.

    Raises:
        ConfigError: no installed package has such an entry point, or its class cannot be imported.
    """
    points = kinds()
    if "local" not in points:
        raise ConfigError(
            "this quantexp was installed before its source was updated, and its launchers are not registered; "
            "install it again (pip install -e .)"
        )
    if kind not in points:
        close = did_you_mean(near(kind, dict.fromkeys(points)))
        raise ConfigError(
            f"launcher.kind must be one of {', '.join(sorted(points))}, got {kind!r}"
            f"{close and f'; {close}'} (a package adds a kind by an entry point in the group {GROUP})"
        )
    try:
        return points[kind].load()()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"launcher.kind={kind} cannot be loaded from {points[kind].value}: {error}"
        ) from error


def check_launcher(launcher: LauncherConfig) -> None:
    """Refuse an unknown kind, and options and keys that the kind does not take.

    Raises:
        ConfigError: names the key.
    """
    load_launcher(launcher.kind).check(launcher)


def options_of(launcher: LauncherConfig, kind: type[_Options]) -> _Options:
    """`launcher.options` as an instance of the launcher's dataclass, which gives the types and the defaults.

    Raises:
        ConfigError: an option that the dataclass does not have, or a value of the wrong type.
    """
    # Imported late: the ledger needs `load_launcher` alone.
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    from quantexp.config.values import wrong_type

    try:
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), launcher.options))
    except OmegaConfBaseException as error:
        key, first = f"launcher.options.{error.full_key}", str(error).splitlines()[0]
        if isinstance(error, ConfigKeyError):
            allowed = ", ".join(kind.__dataclass_fields__) or "none"  # type: ignore[attr-defined]
            raise ConfigError(
                f"unknown key {key}; allowed with launcher.kind={launcher.kind}: {allowed}"
            ) from error
        raise ConfigError(wrong_type(key, first) or f"{key}: {first}") from error
    assert isinstance(options, kind)
    return options

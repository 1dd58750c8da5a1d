"""Reads the entries of a published config.json: each has the type that its family declares, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantexp.errors import ConfigError

Json = Mapping[str, Any]

#: The default of an entry that must be there.
_REQUIRED: Any = object()
#: Above every number of a model.
_LARGEST = 1e18


class Entries:
    """Typed access to a config.json with clear errors; files may store rotary parameters in an old or a new place."""

    def __init__(self, content: Json, file: Path) -> None:
        self.content, self.file = content, file
        self.rope = self._mapping("rope_parameters") or {}

    def number(
        self, key: str, content: Json | None = None, where: str = "", default: Any = _REQUIRED
    ) -> Any:
        """A finite number; the default, if there is one, for a missing or null entry."""
        value = (self.content if content is None else content).get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.file}: {where}{key} must be a number, got {value!r}")
        if not abs(value) < _LARGEST:
            raise ConfigError(f"{self.file}: {where}{key} must be below {_LARGEST:g}, got {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; the default for a missing or null entry."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {key} must be true or false, got {value!r}")
        return value

    def rope_theta(self) -> int:
        """The base period of the rotary embedding."""
        here = self.rope if "rope_theta" in self.rope else self.content
        theta = self.number("rope_theta", here)
        if theta != int(theta):
            raise ConfigError(
                f"{self.file}: rope_theta must be a whole number to be built here, got {theta}"
            )
        return int(theta)

    def rope_scaling(self, built: str) -> Json | None:
        """The scaling of rotary frequencies; None if there is none."""
        scaling = self.rope or self._mapping("rope_scaling")
        if scaling is None:
            return None
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return None
        if kind != built:
            raise ConfigError(
                f"{self.file}: rope_scaling must be of type {built} or none to be built here, got {kind!r}"
            )
        return scaling

    def _mapping(self, key: str) -> Json | None:
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {key} must be a JSON object or null, got {value!r}")
        return value

"""Range checks of numbers; errors name the full key."""

from __future__ import annotations

import math

from quantexp.errors import ConfigError


def at_least(key: str, value: int, least: int) -> None:
    """Refuse a number below the minimum.

    Raises:
        ConfigError: names key, value and bound.
    """
    if value < least:
        raise ConfigError(f"{key} must be at least {least}, got {value}")


def positive(key: str, value: float) -> None:
    """Refuse zero, negative and non-finite numbers.

    Raises:
        ConfigError: names key and value.
    """
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{key} must be a positive number, got {value}")


def not_negative(key: str, value: float) -> None:
    """Refuse negative and non-finite numbers.

    Raises:
        ConfigError: names key and value.
    """
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{key} must be a number of at least 0, got {value}")

"""Refuses values of a composed configuration that its types accept and that do not hold what their author wrote.

OmegaConf keeps the default where a value is missing (`???`), and converts numbers and truth values to text: 1.50 in a
YAML file would be the text 1.5, and `yes` the text True.
"""

from __future__ import annotations

import math
from typing import Any

from quantexp.config.words import control_character
from quantexp.errors import ConfigError
from quantexp.schema import MemoryCheck
from quantexp.schema.keys import kind_of
from quantexp.schema.limits import MISSING

#: Keys of text with choices that YAML reads as true and false.
_TRUTH_VALUES = ("analysis.auto", "launcher.sbatch.")
#: Sections without a schema of their own.
_FREE = ("sweep.", "launcher.options", "quant.formats.")


def check_values(content: Any, key: str = "") -> None:
    """Refuse missing values, control characters, and numbers and truth values where a key holds text.

    Raises:
        ConfigError: names the full key.
    """
    if isinstance(content, dict):
        for name, value in content.items():
            check_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            _check_element(f"{key}[{index}]", value)
            check_values(value, f"{key}[{index}]")
    elif isinstance(content, str):
        _check_text(key, content)
    elif isinstance(content, int | float):
        check_number(key, content)


def memory_of(value: Any) -> MemoryCheck | float:
    """The value of the key `memory`: a word, or a number of units of 1e9 bytes.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, MemoryCheck):
        return value
    if isinstance(value, str) and value in MemoryCheck.__members__:
        return MemoryCheck[value]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(
            f"memory must be one of {', '.join(MemoryCheck.__members__)}, or the GB of each process such as 80, got "
            f"{value!r}"
        )
    return number


def check_number(key: str, number: float) -> None:
    """Refuse a number or truth value that OmegaConf converts to another type than its own: 2 would be true.

    Raises:
        ConfigError: names the key.
    """
    kind = kind_of(key)
    if kind is bool and number not in (0, 1):
        raise ConfigError(f"{key} must be true or false, got {number}")
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if kind is str and not is_whole and not key.startswith(_TRUTH_VALUES):
        shown = str(number).lower()
        raise ConfigError(f"{key} must be text, got {shown}; put the text in quotes")


def _check_element(key: str, value: Any) -> None:
    """Refuse a list or mapping where OmegaConf does not check it: as an element of a list of values."""
    if isinstance(value, list) and not key.startswith(_FREE):
        raise ConfigError(f"{key} must be one value, got the list {value}")
    is_section = key.startswith((*_FREE, "quant.rules", "capture.rules")) or ".parts[" in key
    if isinstance(value, dict) and not is_section:
        raise ConfigError(f"{key} must be one value, got the mapping {value}")


def _check_text(key: str, text: str) -> None:
    if text == MISSING:
        raise ConfigError(f"{key} has no value; give {key}=...")
    if (control := control_character(text)) is not None:
        raise ConfigError(f"{key} must hold no control characters, got {control!r}")

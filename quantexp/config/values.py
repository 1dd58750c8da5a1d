"""Refuses values of a composed configuration that its types accept and that do not hold what their author wrote.

OmegaConf keeps the default where a value is missing (`???`), and converts numbers and truth values to text: 1.50 in a
YAML file would be the text 1.5, and `yes` the text True. What it refuses itself gets our words (`wrong_type`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from quantexp.config.words import control_character
from quantexp.errors import ConfigError
from quantexp.schema import MemoryCheck
from quantexp.schema.keys import element_of, kind_of
from quantexp.schema.limits import FACTOR, MISSING
from quantexp.terminal.close_matches import did_you_mean, near

#: Keys of text with choices that YAML reads as true and false.
_TRUTH_VALUES = ("analysis.auto", "launcher.sbatch.")
#: Sections without a schema of their own.
_FREE = ("sweep.", "launcher.options", "quant.formats.")
#: OmegaConf's message for a value of the wrong type, and the names of the types in messages.
_TYPE_ERROR = re.compile(
    r"Value '(?P<given>.*)' (of type '.*' could not be converted to|is not a valid) (?P<wanted>\w+)"
)
#: Its message for a value outside a fixed set.
_CHOICE_ERROR = re.compile(r"Invalid value '(?P<given>.*)', expected one of \[(?P<wanted>.*)\]")
_KINDS = {"Float": "a number", "Integer": "a whole number", "bool": "true or false"}
#: Its message for a value of `pre_scale`, the only key of two types.
_PART_ERROR = re.compile(r"Value '(?P<given>.*)' of type '.*' is incompatible with type hint")
#: Its messages for null.
_NULL = ("is not Optional", "NoneType is not a subclass of")
#: Parts of its messages for a missing list, and for a missing dictionary.
_NO_LIST, _NO_MAPPING = "is not a ListConfig", "is not a subclass of"
#: Its messages for a list or mapping where a text, and where one of a set of words must be.
_NO_TEXT = re.compile(r"Cannot convert '.*' to string: '(?P<given>.*)'")
_NO_WORD = re.compile(r"Value (?P<given>.*) \(\w+\) is not a valid input for <enum")
#: What a list, and a section, must be.
A_LIST, A_MAPPING = "must be a list, in brackets", "must be keys with values, in braces"


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
    is_section = key.startswith(_FREE) or element_of(key.rpartition("[")[0]) is not None
    if isinstance(value, dict) and not is_section:
        raise ConfigError(f"{key} must be one value, got the mapping {value}")


def _check_text(key: str, text: str) -> None:
    if text == MISSING:
        raise ConfigError(f"{key} has no value; give {key}=...")
    if (control := control_character(text)) is not None:
        raise ConfigError(f"{key} must hold no control characters, got {control!r}")


def wrong_type(key: str, omegaconf_says: str) -> str | None:
    """The message for a value of the wrong type; None if OmegaConf's message is about something else."""
    if any(words in omegaconf_says for words in _NULL):
        return f"{key} must have a value, got null; drop it for the default"
    if _NO_LIST in omegaconf_says:
        return f"{key} {A_LIST}"
    if _NO_MAPPING in omegaconf_says:
        return f"{key} {A_MAPPING}"
    if other := _NO_TEXT.search(omegaconf_says) or _NO_WORD.search(omegaconf_says):
        return f"{key} must be one value, got {other['given']}"
    if choice := _CHOICE_ERROR.search(omegaconf_says):
        close = did_you_mean(near(choice["given"], choice["wanted"].split(", ")))
        return f"{key} must be one of {choice['wanted']}, got {choice['given']!r}{close and f'; {close}'}"
    if part := _PART_ERROR.search(omegaconf_says):
        return f"{key} {FACTOR.requirement}, got {part['given']!r}"
    typed = _TYPE_ERROR.search(omegaconf_says)
    if typed is None or typed["wanted"] not in _KINDS:
        return None
    return f"{key} must be {_KINDS[typed['wanted']]}, got {typed['given']!r}"

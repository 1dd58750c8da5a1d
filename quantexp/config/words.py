"""Refuses overrides that no parser can read in bounded time or depth, and overrides that would change nothing.

`check_text` sees an override as it is typed, before Hydra parses it: the parser recurses into brackets, a number of
thousands of digits is not a number, and a long key is not a file name. `check_meaning` sees the parsed override: Hydra
accepts some that set nothing, such as its own options and values that are missing.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

from quantexp.config.choices import NOT_CHOSEN, groups
from quantexp.errors import ConfigError
from quantexp.schema.limits import MISSING

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: The most characters of an override and of its key, digits of a number, and brackets within each other.
LONGEST_WORD, LONGEST_KEY, MOST_DIGITS, DEEPEST = 50_000, 200, 300, 30
_DIGITS = re.compile(rf"\d(?:_?\d){{{MOST_DIGITS},}}", re.ASCII)
#: A quoted text; without an end, up to the end of the word.
_QUOTED = re.compile(r"(['\"])(?:(?!\1)[^\\]|\\.)*+(\1?)", re.DOTALL)
#: Hydra's own keys that have a meaning for quantexp; a sweep's file has `hydra.sweeper.params`.
_OF_HYDRA = ("hydra.searchpath", "hydra.sweeper.params")
#: Groups whose choices are combined: several of them are a list.
_COMBINED = "experiment"


def check_text(word: str) -> None:
    """Refuse an override by its length, nesting, digits and characters.

    Raises:
        ConfigError: names the override and the limit.
    """
    key, _, value = word.partition("=")
    key = key.strip()
    _at_most(LONGEST_WORD, len(word), f"an override ({key}) must have", "characters")
    _at_most(LONGEST_KEY, len(key), f"a key ({key}) must have", "characters")
    if not key.strip("+~@ "):
        raise ConfigError(
            f"cannot read the override {word!r}: write key=value, where the key has letters, digits, _, dots and "
            "slashes only"
        )
    if (control := control_character(word)) is not None:
        raise ConfigError(f"{_named(key)} must hold no control characters, got {control!r}")
    unquoted = _QUOTED.sub(lambda match: "" if match[2] else match[0], value)
    if digits := _DIGITS.search(unquoted):
        _at_most(MOST_DIGITS, len(digits[0]), f"a number ({key}) must have", "digits")
    _at_most(DEEPEST, nesting(unquoted), f"brackets ({key}) must be", "deep")


def control_character(text: str) -> str | None:
    """The first control character other than a line break or a tab, or half of a character; None without one."""
    kinds = ("Cc", "Cs")
    return next((c for c in text if unicodedata.category(c) in kinds and c not in "\n\t"), None)


def nesting(text: str) -> int:
    """How deep the brackets of a text lie within each other."""
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + (character in "[{(") - (character in "]})"))
        deepest = max(deepest, depth)
    return deepest


def check_meaning(override: Override) -> None:
    """Refuse a parsed override that sets nothing, or a group's choice that is no name.

    Raises:
        ConfigError: names the override.
    """
    word, key, value = override.input_line, override.key_or_group, override.value()
    if re.match(r"hydra(?![\w-])", key) and key not in _OF_HYDRA:
        raise ConfigError(f"{word}: hydra keys have no effect on an experiment; drop it")
    if key == NOT_CHOSEN:
        raise ConfigError(
            f"{word}: {NOT_CHOSEN} follows from model and training and cannot be chosen; set the keys that it cuts "
            "(model.num_layers, ...)"
        )
    if _is_missing(value):
        raise ConfigError(
            f"{word}: {MISSING} is not a value and would set nothing; give one, or null"
        )
    if key in groups() and not isinstance(value, dict) and not override.is_choice_sweep():
        _check_choice(override, value)


def _check_choice(override: Override, value: Any) -> None:
    key, word = override.key_or_group, override.input_line
    if override.is_sweep_override() or (override.is_delete() and value is None):
        return
    names = value if isinstance(value, list) and key == _COMBINED else [value]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{word}: {key} must be the name of a choice (quantexp list)")


def _is_missing(value: object) -> bool:
    if (choices := getattr(value, "list", None)) is not None:  # a ChoiceSweep
        return _is_missing(choices)
    if isinstance(value, list):
        return any(map(_is_missing, value))
    if isinstance(value, dict):
        return any(map(_is_missing, value.values()))
    return getattr(value, "text", value) == str(MISSING)


def _at_most(most: int, count: int, what: str, unit: str) -> None:
    if count > most:
        raise ConfigError(f"{what} at most {most:,} {unit}, got {count:,}")


def _named(key: str) -> str:
    return repr(key) if control_character(key) else key

"""Prepares command-line overrides for Hydra's grammar, and explains overrides that it cannot parse.

The grammar gives a meaning to commas, quotes, brackets and `name(...)`, and accepts few other characters: it stops at
`<`, `#`, `=` or a letter outside ASCII. A value that it cannot parse and that has none of those meanings can only be
text, so this module quotes it: `dataset.eod=<|endoftext|>` works as typed. Any other value that it cannot parse is an
error that says what to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from quantexp.config.words import check_text
from quantexp.errors import ConfigError
from quantexp.folders import quoted, shell_word
from quantexp.schema.keys import kind_of
from quantexp.terminal.close_matches import did_you_mean, near, one_of

#: The key of a published configuration, which replaces the chosen model.
FROM_HF = "model.from_hf"
_KEY = re.compile(r"(?:\+{1,2}|~)?[A-Za-z_$][\w$./:@-]*", re.ASCII)
_CALL = re.compile(r"\s*(?P<name>\w+)\s*\(.*", re.DOTALL)
_PAIRS = {"]": "[", "}": "{", ")": "("}
_QUOTES = "'\""
#: Functions of the grammar, and how to write them.
_FORMS = {
    "range": "range(first,end,step)",
    "choice": "choice(a,b)",
    "glob": "glob(pattern)",
    "interval": "interval(first,end)",
    "shuffle": "shuffle(a,b)",
    "sort": "sort(a,b)",
    "str": "str(value)",
    "int": "int(value)",
    "float": "float(value)",
    "bool": "bool(value)",
}
_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])", re.ASCII)


def key_of(word: str) -> str:
    """The key of an override, without a plus."""
    return word.lstrip("+").partition("=")[0]


def words_to_choose_by(words: list[str]) -> list[str]:
    """The overrides that determine the published configuration: with `model.from_hf`, without the model's other keys.

    Those keys may belong to a part (`model.mla`) that only the published model has.
    """
    keys = [key_of(word) for word in words]
    if FROM_HF not in keys:
        return words
    return [w for w, key in zip(words, keys, strict=True) if key == FROM_HF or key[:6] != "model."]


def readable(words: list[str]) -> list[str]:
    """The overrides, with quotes around values that can only be text and that Hydra cannot parse.

    Raises:
        ConfigError: an override cannot be parsed and is ambiguous or meaningless.
    """
    parser = OverridesParser.create()
    return [_readable(parser, word) for word in words]


def _readable(parser: OverridesParser, word: str) -> str:
    check_text(word)
    try:
        override = parser.parse_override(word)
    except HydraException as error:
        key, _, value = word.partition("=")
        if not _KEY.fullmatch(key) or not _is_plain_text(value):
            raise ConfigError(unreadable(word)) from error
        return f"{key}={quoted(value.strip())}"
    return text_as_typed(word, override)


def text_as_typed(word: str, override: Override) -> str:
    """The override with quotes around values that Hydra reads as numbers or truth values for a key that holds text.

    Without them 1.50 would be the text 1.5, 1e3 the text 1000.0 and true the text True.
    """
    key, _, value = word.partition("=")
    is_text = kind_of(override.key_or_group) is str
    if override.is_delete() or not is_text or override.package is not None:
        return word
    parsed = override.value()
    typed: list[str] = [value]
    values: list[object] = [parsed]
    if isinstance(parsed, ChoiceSweep) and parsed.simple_form:
        typed, values = value.split(","), [*parsed.list]
    if len(typed) != len(values):
        return word
    pairs = zip(typed, values, strict=True)
    return f"{key}={','.join(_text_as_typed(*pair) for pair in pairs)}"


def _text_as_typed(typed: str, value: object) -> str:
    # A bracket makes it a part of shuffle(...), int(...).
    is_number = isinstance(value, int | float) and not set("()") & set(typed)
    return quoted(typed.strip()) if is_number and str(value) != typed.strip() else typed


def unreadable(word: str) -> str:
    """Why an override cannot be parsed, and what to write instead, in one line."""
    key, equals, value = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        return (
            f"cannot read the override {word!r}: write key=value, where the key has letters, digits, _, dots and "
            "slashes only"
        )
    text = _for_the_shell(f"{key}={quoted(value.strip())}")
    call = _CALL.fullmatch(value)
    if open_ := _unclosed(value):
        reason = f"{open_} is not closed"
    elif call and call["name"] in _FORMS:
        reason = f"{value.strip()} cannot be evaluated; write {_FORMS[call['name']]}"
    elif call:
        forms = did_you_mean(near(call["name"], _FORMS)) or f"it may be {one_of(_FORMS)}"
        reason = f"{call['name']}(...) has no meaning here; {forms}"
    elif "," in value and value.lstrip()[:1] not in ("[", "{"):
        several = ",".join(quoted(part.strip()) for part in value.split(","))
        return (
            f"cannot read the override {word!r}: a comma separates the values of a sweep; for one text write {text}, "
            f"for several values {_for_the_shell(f'{key}={several}')}"
        )
    else:
        reason = "put quotes around each text in it"
    return f"cannot read the override {word!r}: {reason}; to give it as text, write {text}"


def _for_the_shell(word: str) -> str:
    """The word quoted for a shell, in double quotes if they preserve it."""
    is_plain = word.isprintable() and not re.search(r'["$`\\!]', word)
    return f'"{word}"' if is_plain else shell_word(word)


def _is_plain_text(value: str) -> bool:
    """Whether no part of the value has a meaning in the grammar, so that it can only be text."""
    text = value.strip()
    return (
        bool(text)
        and "," not in text
        and not _CALL.fullmatch(text)
        and text[0] not in "[{" + _QUOTES
        and text[-1] not in _QUOTES
        and _unclosed(text) is None
    )


def _unclosed(value: str) -> str | None:
    """The unbalanced bracket or quote of a value; None if all are balanced."""
    opened: list[str] = []
    quote = value.strip()[:1]
    if quote and quote in _QUOTES and not value.strip()[1:].endswith(quote):
        return quote
    for character in re.sub(r"'[^']*'|\"[^\"]*\"", "", value):
        if character in _PAIRS.values():
            opened.append(character)
        elif character in _PAIRS and (not opened or opened.pop() != _PAIRS[character]):
            return character
    return opened[-1] if opened else None


@contextmanager
def numbers_as_typed(words: list[str]) -> Iterator[None]:
    """Errors about a key of these overrides show its number as it was typed: 1e9 and not 1000000000.0."""
    try:
        yield
    except ConfigError as error:
        message = as_typed(str(error), words)
        if message == str(error):
            raise
        raise ConfigError(message) from error


def as_typed(message: str, words: list[str]) -> str:
    """A message with the numbers of its overrides written as the user typed them."""
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") in message:
            for typed in _NUMBER.findall(value):
                shown = re.escape(str(float(typed)))
                message = re.sub(rf"(?<![\w.]){shown}(?![\w.]*\w)", typed, message)
    return message

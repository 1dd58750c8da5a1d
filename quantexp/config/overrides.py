"""The overrides of a command line, as Hydra's grammar can read them; what it cannot read is refused in our words.

The grammar gives a meaning to commas, quotes, brackets and `name(...)`, and knows few other characters: it stops at
`<`, `#`, `=` or a letter outside ASCII. A value that it cannot read and that has none of those meanings can only be
text, so it is put in quotes here: `dataset.eod=<|endoftext|>` works as it is typed. Anything else that it cannot read
is an error that says what to write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from quantexp.errors import ConfigError
from quantexp.terminal.close_matches import did_you_mean, near, one_of

_KEY = re.compile(r"(?:\+{1,2}|~)?[A-Za-z_$][\w$./:@-]*", re.ASCII)
_CALL = re.compile(r"\s*(?P<name>\w+)\s*\(.*", re.DOTALL)
_PAIRS = {"]": "[", "}": "{", ")": "("}
_QUOTES = "'\""
#: What stands for several values, or for another one, and how it is written.
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


def readable(words: list[str]) -> list[str]:
    """The overrides, with quotes around a value that can only be text and that Hydra cannot read.

    Raises:
        ConfigError: an override that cannot be read and may mean several things, or none.
    """
    parser = OverridesParser.create()
    return [_readable(parser, word) for word in words]


def _readable(parser: OverridesParser, word: str) -> str:
    try:
        parser.parse_override(word)
    except HydraException as error:
        key, _, value = word.partition("=")
        if not _KEY.fullmatch(key) or not _is_plain_text(value):
            raise ConfigError(unreadable(word)) from error
        return f"{key}={quoted(value.strip())}"
    return word


def quoted(value: str) -> str:
    """The value as Hydra's grammar takes it literally."""
    inside = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value)
    return f"'{inside}'"


def unreadable(word: str) -> str:
    """Why an override cannot be read, and what to write, in one line."""
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
    """The word as it is typed in a shell, in double quotes where they keep it as it is."""
    return shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'


def _is_plain_text(value: str) -> bool:
    """Whether nothing in the value may have a meaning for the grammar, so that it can only be text."""
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
    """The bracket or quote that is open at the end of a value, or closes nothing; None where all is closed."""
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
    """A message with the numbers of the overrides that it is about as they were typed."""
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") in message:
            for typed in _NUMBER.findall(value):
                shown = re.escape(str(float(typed)))
                message = re.sub(rf"(?<![\w.]){shown}(?![\w.]*\w)", typed, message)
    return message

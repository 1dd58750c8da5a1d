"""Overrides that are refused before and after parsing, by their messages."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from quantexp.config.words import (
    DEEPEST,
    LONGEST_KEY,
    LONGEST_WORD,
    MOST_DIGITS,
    check_meaning,
    check_text,
    control_character,
    nesting,
)
from quantexp.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "words"),
    [
        (f"a={'x' * 50_000}", "an override (a) must have at most 50,000 characters, got 50,002"),
        (f"{'a' * 201}=1", "must have at most 200 characters, got 201"),
        (f"a={'9' * 301}", "a number (a) must have at most 300 digits, got 301"),
        (f"a=-1{'_9' * 300}", "a number (a) must have at most 300 digits, got 601"),
        (f"a={'[' * 31}", "brackets (a) must be at most 30 deep, got 31"),
        (f"a={'{b:' * 31}", "brackets (a) must be at most 30 deep, got 31"),
        ("a=\x1b[31m", "a must hold no control characters, got '\\x1b'"),
        ("a\x9b=1", "'a\\x9b' must hold no control characters, got '\\x9b'"),
        ("a=\udce9", "a must hold no control characters, got '\\udce9'"),
        ("~=1", "cannot read the override '~=1': write key=value, where the key has letters"),
        ("++@=", "cannot read the override '++@=': write key=value, where the key has letters"),
    ],
)
def test_text_beyond_a_limit_is_refused_by_its_key(word: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_text(word)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        f"a={'x' * (LONGEST_WORD - 2)}",
        f"{'a' * LONGEST_KEY}=1",
        f"a={'9' * MOST_DIGITS}",
        f"a={'[' * DEEPEST}{']' * DEEPEST}",
        f"a='{'9' * 400}{'[' * 40}'",
        "a=line\n\tline",
        "~a",
        "a=größe 日本",
    ],
)
def test_text_within_the_limits_passes(word: str) -> None:
    check_text(word)


def test_nesting_is_that_of_the_deepest_bracket() -> None:
    assert nesting("[{a: (1)}, [2]]") == 3
    assert nesting("]]]") == 0


def test_control_character_is_the_first_that_is_no_line_break_or_tab() -> None:
    assert control_character("a\n\tb") is None
    assert control_character("a\n\x07\x1b") == "\x07"


def check(word: str) -> None:
    check_meaning(OverridesParser.create().parse_override(word))


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("hydra.job.name=x", "hydra keys have no effect on an experiment; drop it"),
        ("hydra/output=x", "hydra keys have no effect on an experiment; drop it"),
        ("+hydra=1", "hydra keys have no effect on an experiment; drop it"),
        (
            "model/cut@model=x",
            "model/cut follows from model and training and cannot be chosen; set",
        ),
        ("~model/cut@model", "model/cut follows from model and training and cannot be chosen; set"),
        ("a=???", "??? is not a value and would set nothing; give one, or null"),
        ("a='???'", "??? is not a value and would set nothing; give one, or null"),
        ("a=[{b: ???}]", "??? is not a value and would set nothing; give one, or null"),
        ("a=1,???", "??? is not a value and would set nothing; give one, or null"),
        ("quant=null", "quant must be the name of a choice (quantexp list)"),
        ("training=1.5", "training must be the name of a choice (quantexp list)"),
        ("~model=1.0", "model must be the name of a choice (quantexp list)"),
        ("+launcher=[{}]", "launcher must be the name of a choice (quantexp list)"),
        ("training=[fast,default]", "training must be the name of a choice (quantexp list)"),
        ("quant/linear=", "quant/linear must be the name of a choice (quantexp list)"),
    ],
)
def test_override_that_means_nothing_is_refused(word: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(word)
    assert str(caught.value).startswith(f"{word}: {words}")


@pytest.mark.parametrize(
    "word",
    ["quant=bf16", "~capture", "+experiment=[a,b]", "hydra.searchpath=[a]", "quant=a,b", "a=null"],
)
def test_override_that_means_something_passes(word: str) -> None:
    check(word)

"""Plain values against types: errors name the key, and valid values are unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated, Any, NotRequired, Required, TypedDict

import pytest

from quantexp.reading.typed import (
    REQUIRED,
    Count,
    Like,
    Rule,
    WrongTypeError,
    check_known,
    typed,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(TypedDict, total=False):
    number: Required[Count]
    words: str


class Outer(TypedDict):
    inner: list[Inner]
    pair: NotRequired[tuple[int, str]]
    named: NotRequired[dict[str, float | None]]


@dataclass
class Record:
    colour: Colour = field(default=Colour.RED, metadata=REQUIRED)
    flag: bool = False
    even: Annotated[int, Rule("an even number", lambda n: n % 2 == 0)] = 0
    inner: Annotated[dict[str, Any], Like(Inner)] = field(default_factory=dict)


def wrong(value: Any, kind: Any) -> str:
    with pytest.raises(WrongTypeError) as caught:
        typed(value, kind)
    return str(caught.value)


def test_values_of_the_type_are_accepted() -> None:
    assert typed({"colour": "blue", "even": 4}, Record) == Record(Colour.BLUE, even=4)
    outer = {
        "inner": [{"number": 3, "other": object}],
        "pair": [1, "a"],
        "named": {"x": 1, "y": None},
    }
    assert typed(dict(outer), Outer) == {**outer, "pair": (1, "a")}


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("abc", float, "it must be a number, got 'abc'"),
        (True, int, "it must be a whole number, got True"),
        (1.0, int, "it must be a whole number, got 1.0"),
        (1, str, "it must be a text, got 1"),
        (None, bool, "it must be true or false, got null"),
        (1 << 63, Count, "it must be a whole number from 0, got 9223372036854775808"),
        ({"inner": 1}, Outer, "inner must be a list, got 1"),
        ({}, Outer, "inner is missing"),
        ({"inner": [{}]}, Outer, "inner[0].number is missing"),
        (
            {"inner": [{"number": 1}, {"number": -1}]},
            Outer,
            "inner[1].number must be a whole number from 0, got -1",
        ),
        ({"inner": [], "pair": [1]}, Outer, "pair must be a list of 2, got a list"),
        ({"inner": [], "pair": [1, 2]}, Outer, "pair[1] must be a text, got 2"),
        (
            {"inner": [], "named": {"a b": "x"}},
            Outer,
            "named.'a b' must be a number or null, got 'x'",
        ),
        ({"colour": "green"}, Record, "colour must be one of red, blue, got 'green'"),
        ({"colour": []}, Record, "colour must be one of red, blue, got a list"),
        ({}, Record, "colour is missing"),
        ({"colour": "red", "x\x1b": 1}, Record, "'x\\x1b' is a key of another version"),
        ({"colour": "red", "even": 3}, Record, "even must be an even number, got 3"),
        ({"colour": "red", "inner": {}}, Record, "inner.number is missing"),
        ("x" * 100, int, f"it must be a whole number, got '{'x' * 39}..."),
    ],
)
def test_wrong_values_are_named_by_their_key(value: Any, kind: Any, words: str) -> None:
    assert wrong(value, kind) == words


class Level(Enum):
    off = 1


@dataclass
class Section:
    level: Level = Level.off
    number: int | None = None
    rules: list[int] = field(default_factory=list)


@dataclass
class Configuration:
    section: Section | None = None
    scale: float = 1.0


def test_only_known_keys_of_a_configuration_are_checked() -> None:
    check_known(
        {"section": {"level": "any", "number": None, "former": []}, "more": 1}, Configuration
    )
    check_known({"section": None, "scale": 3}, Configuration)
    for value, words in (
        ({"section": {"number": "x"}}, "section.number must be a whole number, got 'x'"),
        ({"section": {"level": 3}}, "section.level must be a text, got 3"),
        ({"section": []}, "section must be keys with values, got a list"),
        ({"scale": None}, "scale must be a number, got null"),
        ([], "it must be keys with values, got a list"),
    ):
        with pytest.raises(WrongTypeError) as caught:
            check_known(value, Configuration)
        assert str(caught.value) == words

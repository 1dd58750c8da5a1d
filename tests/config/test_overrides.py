"""Overrides that Hydra's grammar cannot read as they are typed."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from quantexp.config.overrides import as_typed, readable
from quantexp.errors import ConfigError
from quantexp.folders import quoted

#: Values that can only be text.
TEXTS = [
    "<|endoftext|>",
    "--gres=gpu:1",
    "a=b",
    "it's",
    "x#y",
    "größe",
    "/data/run (copy)",
    "/x[1]/y",
    "~/runs",
    "a;b & c",
    r"\\p{L}+=\\",
    "line\nline",
]
#: Words of Hydra that no message may contain.
INNER = ("lexer", "token", "antlr", "viable", "mismatched", "extraneous", "hydra", "parse", "EOF")


def value(word: str) -> object:
    return OverridesParser.create().parse_override(word).value()


@pytest.mark.parametrize("text", TEXTS)
def test_value_that_can_only_be_text_is_that_text(text: str) -> None:
    (word,) = readable([f"+key={text}"])
    assert word.startswith("+key='")
    assert value(word) == text


@pytest.mark.parametrize(
    "word", ["a=1", "a=x y", "a='<x>'", "a=[1,2]", "a=glob(*)", "~a", "a=", "quant@x=b", "a={b: c}"]
)
def test_readable_override_is_unchanged(word: str) -> None:
    assert readable([word]) == [word]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("a b=c", "write key=value, where the key has letters, digits, _, dots and slashes only"),
        ("=<c>", "write key=value, where the key has letters, digits, _, dots and slashes only"),
        ("a<b", "write key=value, where the key has letters, digits, _, dots and slashes only"),
        ("a=[b", "[ is not closed; to give it as text, write \"a='[b'\""),
        ("a={b", "{ is not closed; to give it as text, write \"a='{b'\""),
        ("a=b]", "] is not closed; to give it as text, write \"a='b]'\""),
        ("a='b", "' is not closed; to give it as text, write "),
        (
            "a=<b>,<c>",
            "a comma separates the values of a sweep; for one text write \"a='<b>,<c>'\", for several values "
            "\"a='<b>','<c>'\"",
        ),
        ("a=[<b>]", "put quotes around each text in it; to give it as text, write \"a='[<b>]'\""),
        ("a=rang(1,4)", "rang(...) has no meaning here; did you mean range?; to give it as text,"),
        ("a=f(1)", "f(...) has no meaning here; it may be range, choice, glob, interval, "),
        ("a=range(x)", "range(x) cannot be evaluated; write range(first,end,step); to give it"),
    ],
)
def test_unreadable_override_is_refused_in_one_line_with_the_reason(word: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        readable(["b=1", word])
    message = str(caught.value)
    assert message.startswith(f"cannot read the override {word!r}: {reason}")
    assert not [inner for inner in INNER if inner in message]
    assert "\n" not in message


@pytest.mark.parametrize("word", ["a=[b", "a='b", "a=<b>,$c", 'a=["<b>]'])
def test_remedy_can_be_typed_unchanged(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        readable([word])
    remedy = str(caught.value).partition(
        ", write " if ", write " in str(caught.value) else "text write "
    )[2]
    (typed,) = shlex.split(remedy.partition(", for several")[0])
    assert value(typed) == word.removeprefix("a=")


@pytest.mark.parametrize("text", ["", "'", "a'b", "\\", "a\\'", "\\\\'\\", ",[", "${x}"])
def test_quoted_text_is_taken_literally(text: str) -> None:
    assert value(f"a={quoted(text)}") == text


def test_numbers_of_another_key_stay_as_they_are() -> None:
    message = "training.lr must be positive, got 1000000000.0"
    assert as_typed(message, ["training.lr=1e9"]) == "training.lr must be positive, got 1e9"
    assert as_typed(message, ["model.rope_base=1e9"]) == message
    assert as_typed("a 11000000000.0", ["a=1e9"]) == "a 11000000000.0"


@pytest.mark.parametrize(
    "word",
    [
        "~launcher.environment.FOO",
        "+launcher.environment.X=shuffle(1.50,2.5)",
        "paths.root=int(3.5)",
    ],
)
def test_deletions_and_functions_of_a_text_key_stay_as_they_are(word: str) -> None:
    assert readable([word]) == [word]

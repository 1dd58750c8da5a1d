"""Attacks on the conversion of wikitext: pages made of marks in any order, closed or not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from quantexp.data import page_parser
from quantexp.data.page_parser import page_text

MARKS = (
    *("{{", "{{a", "{{a|", "{{a|b=", "{{{", "{{{a|", "{", "}", "}}", "}}}", "[[", "[[a|", "[[File:a|", "]]", "]"),
    *("[", "[http://", "[http://a ", "[[http://a ", "[//a ", "http://a", "a:", "//", "<", "<div>", '<div a="', "<a "),
    *("<div a='b", "<div a=", "<ref>", "<ref/>", "</ref>", "</div>", "</", "<br>", "<li>", "<td>", "<b>", "</b>"),
    *("<nowiki>", "</nowiki>", "<pre>", "<math>", "<gallery>", "<syntaxhighlight>", '<"a ', "<!--", "-->", "<!"),
    *("''", "'''", "'''''", "''''", "'", "&", "&#", "&#x", "&amp;", "&#1;", "=", "==", "\n=", "\n==", "\n=a=", "\n"),
    *("\n*", "\n;a:", "*", ":", ";", "#", "\n{|", "\n{|a", "\n|-", "\n|", "\n|}", "\n!", "||", "!!", "|", "!"),
    *("\n----", "__A", "__A__", " ", "\t", "a", "\u00a0", "\u3000", "é", '"', "\\", "/", "-", "~~~~", "\x0b", "\x85"),
)  # fmt: skip
#: Characters of a page.
SIZE = 16_000


def of_size(pattern: str, size: int) -> str:
    return pattern * (size // len(pattern))


def patterns(chance: random.Random) -> tuple[str, str, str]:
    """What a page begins with, repeats in its first half, and repeats in its second."""
    first, second = ("".join(chance.choices(MARKS, k=chance.randint(1, 4))) for _ in range(2))
    return chance.choice(MARKS) * chance.randint(0, 100), first, chance.choice((first, second))


def test_any_page_is_read_or_refused_within_its_limit(
    cases: Iterator[random.Random], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_parser, "MAX_PAGE_S", 1)
    for chance in cases:
        begin, first, second = patterns(chance)
        page = begin + of_size(first, SIZE // 2) + of_size(second, SIZE // 2)
        with contextlib.suppress(ValueError, RecursionError):  # refused by name
            page_text(page)
        assert page_text("a [[b]]") == "a b", (begin, first, second)

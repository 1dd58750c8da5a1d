"""Attacks on the conversion of wikitext: pages made of marks in any order, closed or not."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

from quantexp.data.unclosed import restored, without_costly_marks
from quantexp.data.wikitext import to_plain_text

MARKS = (
    *("{{", "{{a", "{{a|", "{{a|b=", "{{{", "{{{a|", "{", "}", "}}", "}}}", "[[", "[[a|", "[[File:a|", "]]", "]"),
    *("[", "[http://", "[http://a ", "[[http://a ", "[//a ", "http://a", "a:", "//", "<", "<div>", '<div a="', "<a "),
    *("<div a='b", "<div a=", "<ref>", "<ref/>", "</ref>", "</div>", "</", "<br>", "<li>", "<td>", "<b>", "</b>"),
    *("<nowiki>", "</nowiki>", "<pre>", "<math>", "<gallery>", "<syntaxhighlight>", '<"a ', "<!--", "-->", "<!"),
    *("''", "'''", "'''''", "''''", "'", "&", "&#", "&#x", "&amp;", "&#1;", "=", "==", "\n=", "\n==", "\n=a=", "\n"),
    *("\n*", "\n;a:", "*", ":", ";", "#", "\n{|", "\n{|a", "\n|-", "\n|", "\n|}", "\n!", "||", "!!", "|", "!"),
    *("\n----", "__A", "__A__", " ", "\t", "a", "\u00a0", "\u3000", "é", '"', "\\", "/", "-", "~~~~", "\x0b", "\x85"),
)  # fmt: skip
#: Characters of the shorter page; the longer one has eight times as many.
SIZE = 2_000


def of_size(pattern: str, size: int) -> str:
    return pattern * (size // len(pattern))


def patterns(chance: random.Random) -> tuple[str, str, str]:
    """What a page begins with, repeats in its first half, and repeats in its second."""
    first, second = ("".join(chance.choices(MARKS, k=chance.randint(1, 4))) for _ in range(2))
    return chance.choice(MARKS) * chance.randint(0, 100), first, chance.choice((first, second))


def cost_s(page: str) -> float:
    start = time.process_time()
    with contextlib.suppress(ValueError, RecursionError):  # rejected by name
        to_plain_text(page)
    return time.process_time() - start


def test_eight_times_the_page_takes_less_than_twenty_times_the_time(
    cases: Iterator[random.Random],
) -> None:
    for chance in cases:
        begin, first, second = patterns(chance)
        short, long = (
            begin + of_size(first, size // 2) + of_size(second, size // 2)
            for size in (SIZE, 8 * SIZE)
        )
        # The shorter page may cost nothing: 100 characters read in vain for each are allowed in the longer.
        assert cost_s(long) < 20 * max(cost_s(short), 0.05), (begin, first, second)


def test_a_page_that_costs_little_is_unchanged_and_any_page_comes_back(
    cases: Iterator[random.Random],
) -> None:
    for chance in cases:
        page = "".join(chance.choices((*MARKS, "owl ", "hunts "), k=chance.randint(1, 60)))
        assert restored(without_costly_marks(page)) == page
        opens = sum(page.count(mark) for mark in ("[[//", "[[http", "{|"))
        if len(page) < 300 and opens < 6:
            assert without_costly_marks(page) == page

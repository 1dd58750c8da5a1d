"""Pages of wikitext in the child process: the limit of a page, and what ends the child."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quantexp.data import page_parser
from quantexp.data.page_parser import _Parser, page_text
from quantexp.data.wiki_names import ENGLISH
from quantexp.data.wikitext import to_plain_text
from quantexp.errors import DataError


@pytest.fixture
def parser() -> Iterator[_Parser]:
    parser = _Parser()
    yield parser
    parser.end()


def test_a_page_has_the_text_that_this_process_gives_it() -> None:
    pages = ("plain words", "== a ==\n''b'' [[c|d]] {{e|f}} <ref>g</ref>", "", "\ud7ff [[é]]")
    assert [page_text(page) for page in pages] == [to_plain_text(page) for page in pages]


def test_the_parsers_own_error_is_that_of_the_page() -> None:
    with pytest.raises(ValueError, match="mwparserfromhell fails on it: attribute value requires"):
        page_text("{|e=<td>\n\0\n|}[[b]]")


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("[[a|" * 100_000, "it takes mwparserfromhell more than 1 s"),
        ("[[http://a " * 90 + "x" + "]]" * 90, "it takes mwparserfromhell more than 1 s"),
        ("==" + "a=" * 200_000, "it overflows mwparserfromhell's stack"),
    ],
)
def test_a_page_beyond_the_limit_is_refused_and_the_next_is_read(
    parser: _Parser, monkeypatch: pytest.MonkeyPatch, page: str, words: str
) -> None:
    """Marks without an end, constructs that double the time at each level, a heading of equal signs."""
    monkeypatch.setattr(page_parser, "MAX_PAGE_S", 1)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            parser.text_of(page, ENGLISH)
        assert parser.text_of("a [[b]]", ENGLISH) == "a b"


def test_the_limit_is_that_of_one_page(parser: _Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_parser, "MAX_PAGE_S", 2)
    page = "''a'' [[b]] {{c|d}} " * 3_000
    for _ in range(8):
        parser.text_of(page, ENGLISH)


def test_a_child_that_something_else_ends_is_no_fault_of_the_page(parser: _Parser) -> None:
    """At once where it has the page, and without a word where it waits for one."""
    parser.text_of("[[a]]", ENGLISH)
    assert parser._child is not None
    threading.Timer(0.5, os.kill, (parser._child.pid, signal.SIGKILL)).start()
    with pytest.raises(DataError, match="converts wikitext ended with exit code -9: run the same"):
        parser.text_of("[[a|" * 100_000, ENGLISH)
    assert parser.text_of("[[a]]", ENGLISH) == "a"
    parser._child.kill()
    parser._child.wait()
    assert parser.text_of("[[b]]", ENGLISH) == "b"

import random
import time

import mwparserfromhell
import pytest

from quantexp.data import unclosed
from quantexp.data.unclosed import restored, without_costly_marks
from quantexp.data.wikitext import to_plain_text

MARKS = (
    *("{{", "}}", "{{{", "[[", "]]", "[http://a ", "]", "<b>", "</b>", "<i a='", "<nowiki>", "|"),
    *("</nowiki>", "<!--", "-->", "''", "'''", "'''''", "\n{|", "\n|}", "\n=", "=", "</", "<li>"),
    *("[[//a ", "a", " "),
)


def test_a_page_of_ordinary_marks_is_unchanged() -> None:
    page = "\n".join(
        f"== a ==\n''b'' [[c|d]] {{{{e|f=[[g]]}}}} <ref name=x>{{{{cite|{i}}}}}</ref> [http://h i]\n"
        "{| class=x\n| ''j\n| k'''l'''\n|}\n* <br> <li> 5 < 6 <!-- m --> <nowiki>[[</nowiki> {{open"
        for i in range(40)
    )
    assert without_costly_marks(page) == page


@pytest.mark.parametrize(
    "mark",
    [
        "{{a|",
        "{{{a|",
        "[[a|",
        "[http://",
        "<ref>",
        "<div a='",
        "<a ",
        "<nowiki>",
        "<!--",
        "\n=<td>",
    ],
)
def test_marks_without_an_end_become_text_once_they_cost_too_much(mark: str) -> None:
    page = f"{mark} an [[owl]] " * 1200
    changed = without_costly_marks(page)
    assert changed != page
    assert "[[owl]]" in changed, "what has an end keeps it"
    assert restored(changed) == page
    few = mark * 100
    assert without_costly_marks(few) == few


def test_any_text_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unclosed, "_MIN_READS", 0)
    monkeypatch.setattr(unclosed, "_MAX_READS", 1)
    chance, num_changed = random.Random(1), 0
    for _ in range(500):
        page = "".join(chance.choices(MARKS, k=40))
        changed = without_costly_marks(page)
        assert restored(changed) == page
        num_changed += changed != page
    assert num_changed > 400


def test_a_mark_that_another_uncovers_becomes_text_too() -> None:
    """The tables lie within the attributes of tags that have no end."""
    changed = without_costly_marks("<a\n{|" * 3000)
    assert "<" not in changed
    assert "{" not in changed


def test_after_some_rounds_every_mark_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unclosed, "_MAX_ROUNDS", 1)
    changed = without_costly_marks("<a\n{|" * 3000 + "[[b]]")
    assert not set(changed) & set("{[<")
    assert restored(changed).endswith("[[b]]")


@pytest.mark.parametrize(
    ("begin", "end"), [("[[http://a ", "]]"), ("\n{|\n|{{a|", "}}|x\n|}"), ("{{a|[[//b ", "]]}}")]
)
def test_constructs_that_double_the_time_are_text_below_six_levels(begin: str, end: str) -> None:
    six, seven = (begin * depth + "x" + end * depth for depth in (6, 7))
    assert without_costly_marks(six) == six
    assert without_costly_marks(seven) != seven
    start = time.process_time()
    to_plain_text(begin * 90 + "x" + end * 90)
    assert time.process_time() - start < 30, "2^90 times the time of one level"


def test_a_heading_of_a_hundred_thousand_equal_signs_is_text() -> None:
    """The parser would overflow its stack and end the process."""
    assert to_plain_text("==" + "a=" * 200_000) == "==" + "a=" * 200_000
    for page in ("={{a|\n}}" * 11_000, "=<!--\n-->" * 11_000, "=''\n''" * 11_000):
        assert without_costly_marks(page).startswith("\ud804")
    page = "== a ==\n" + "x = y " * 11_000
    assert without_costly_marks(page) == page


def test_the_kinds_of_tags_are_the_librarys() -> None:
    definitions = mwparserfromhell.definitions
    assert set(definitions.PARSER_BLACKLIST) == unclosed._RAW
    assert set(definitions.SINGLE_ONLY) == unclosed._EMPTY
    assert set(definitions.SINGLE) == unclosed._EMPTY | unclosed._OPTIONAL_END
    assert max(map(len, definitions.URI_SCHEMES)) <= 10

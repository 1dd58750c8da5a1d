import json

import pytest

from quantexp.data.sources import (
    EMPTY,
    NAMESPACE,
    REDIRECT,
    Document,
    LeftOut,
    Rejected,
    read_lines,
    read_pages,
    row_record,
)


def page(
    title: str = "Owl", ns: str = "0", page_id: str = "7", body: str = "", text: str = "An [[owl]]."
) -> bytes:
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>{page_id}</id>{body}"
        f"<revision><id>99</id><text>{text}</text></revision></page>"
    ).encode()


def dolma(**fields: object) -> str:
    return json.dumps({"id": "a", "text": "b", "source": "c"} | fields)


def test_an_article_has_its_page_number_title_and_plain_text() -> None:
    assert list(read_pages(page(), 1)) == [Document("7", "An owl.", "wikipedia", "Owl")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (page(body='<redirect title="Owl"/>'), REDIRECT),
        (page(ns="1"), NAMESPACE),
        (page(text=""), EMPTY),
        (page(text="{{only a template}}"), EMPTY),
        (b"<page><title>no revision</title><ns>0</ns><id>5</id></page>", EMPTY),
    ],
)
def test_a_page_that_is_no_article_is_left_out(content: bytes, reason: str) -> None:
    assert list(read_pages(content, 1)) == [LeftOut(reason)]


def test_the_last_of_several_revisions_counts() -> None:
    older = "<revision><text>older</text></revision>"
    (document,) = read_pages(page(body=older, text="newer"), 1)
    assert isinstance(document, Document)
    assert document.text == "newer"


def test_a_malformed_page_is_rejected_with_its_line_and_the_next_is_read() -> None:
    data = b"\n" + page() + b"\n<page>\n<ns>0</wrong></page>" + page(page_id="8")
    first, second, third = read_pages(data, 10)
    assert isinstance(first, Document)
    assert second == Rejected(13, "malformed XML: mismatched tag")
    assert isinstance(third, Document)


def test_a_page_that_the_parser_fails_on_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> str:
        raise ValueError("mwparserfromhell fails on it: x")

    monkeypatch.setattr("quantexp.data.sources.page_text", failing)
    assert list(read_pages(page(), 3)) == [Rejected(3, "wikitext: mwparserfromhell fails on it: x")]


def test_text_nested_beyond_all_measure_is_rejected_or_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deep(*_: object) -> str:
        raise RecursionError

    monkeypatch.setattr("quantexp.data.sources.page_text", deep)
    assert list(read_pages(page(), 3)) == [Rejected(3, "wikitext nested too deeply")]


def test_lines_become_documents_and_blank_ones_are_skipped() -> None:
    lines = (dolma(), "", dolma(text=" "), dolma(id="d", metadata={"title": "e"}), "")
    assert list(read_lines("\n".join(lines).encode(), 1, "x")) == [
        Document("a", "b", "c"),
        LeftOut(EMPTY),
        Document("d", "b", "c", "e"),
    ]


def test_a_line_of_wikiextractor_is_of_the_dataset_and_has_its_title() -> None:
    line = (
        b'{"id": 12, "revid": 1, "url": "https://example.org", "title": "Owl", "text": "An owl."}'
    )
    assert list(read_lines(line, 1, "wikipedia")) == [Document("12", "An owl.", "wikipedia", "Owl")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "malformed JSON: Expecting property name"),
        (b"[" * 100_000, "malformed JSON: nested too deeply"),
        (b"[]", "must be a JSON object, got list"),
        (b'{"id": "a"}', "`text` must be a string, it is missing"),
        (dolma(text=None).encode(), "`text` must be a string, got None"),
        (dolma(text="\ud800").encode(), "`text` has half a surrogate pair"),
        (b'{"text": "\xff"}', "no UTF-8: byte 11 of the line"),
    ],
)
def test_a_line_that_cannot_be_read_is_rejected_with_its_number(line: bytes, reason: str) -> None:
    _, rejected, last = read_lines(b"\n".join([dolma().encode(), line, dolma().encode()]), 4, "x")
    assert isinstance(rejected, Rejected)
    assert rejected.place == 5
    assert rejected.reason.startswith(reason)
    assert last == Document("a", "b", "c")


def test_a_row_needs_only_text() -> None:
    assert row_record({"text": "b"}, 9, "x") == Document("", "b", "x")
    assert row_record({"id": None, "text": "b"}, 9, "x") == Document("", "b", "x")
    assert row_record({"id": 0, "text": "b"}, 9, "x") == Document("0", "b", "x")

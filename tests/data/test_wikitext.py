import time

import pytest

from quantexp.data.wikitext import to_plain_text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("", ""),
        ("plain words", "plain words"),
        ("[[iron]] and [[lime (material)|lime]]s", "iron and limes"),
        ("[[:Category:Owls]]", "Category:Owls"),
        ("[[File:A.jpg|thumb|An [[owl]] at night]]x", "x"),
        ("[[Category:Owls]]", ""),
        ("'''bold''' and ''italic''", "bold and italic"),
        ("a{{b|{{c}}|[[d]]}}e", "ae"),
        ('a<ref name="x" />b<ref>{{cite|c}}</ref>d', "abd"),
        ("a<ref>one</ref> b<ref>two</ref> c", "a b c"),
        ("a<!-- b -->c", "ac"),
        ("[https://example.org a label] [https://example.org]", "a label"),
        ("H<sub>2</sub>O<br/>", "H2O"),
        ("a&nbsp;b &lt;c&gt;", "a b <c>"),
        ("__NOTOC__\na", "a"),
        ("* a\n* b\n# c", "a\nb\nc"),
        ("a\n{|\n! b\n|-\n| c\n|}\nd", "a\n\nd"),
        ("a <math>{b}</math> c", "a c"),
    ],
)
def test_a_construct_leaves_what_a_reader_sees(wikitext: str, text: str) -> None:
    assert to_plain_text(wikitext) == text


def test_headings_and_paragraphs_stand_apart_by_one_empty_line() -> None:
    assert to_plain_text("a\n\n\n\n== b ==\nc\n=== d ===\ne\n") == "a\n\nb\n\nc\n\nd\n\ne"


def test_an_unclosed_template_stays_and_does_not_hang() -> None:
    assert to_plain_text("a {{b") == "a {{b"


def test_a_line_of_blanks_takes_linear_time() -> None:
    """A pattern that tries every way to share the blanks would take the square or the cube of their number."""
    line = "=" + " " * 5_000 + "a"
    start = time.process_time()
    assert to_plain_text(f"{line}\n" * 20 + "[[b]]").endswith("= a\nb")
    assert to_plain_text("a" + "\u3000" * 100_000 + "[[b]]") == "a" + "\u3000" * 100_000 + "b"
    assert time.process_time() - start < 10


def test_markup_that_the_library_fails_on_is_an_error_of_its_own() -> None:
    with pytest.raises(ValueError, match="mwparserfromhell fails on it: attribute value requires"):
        to_plain_text("{|e=<td>\n\0\n|}[[b]]")

"""Wikitext to plain text, for the constructs that carry an encyclopedic article.

What is dropped: comments, `<ref>`, `<gallery>`, `<math>` and `<timeline>` with their content,
templates `{{...}}` (nested ones too), tables `{|...|}`, files, images and categories, behaviour
switches such as `__NOTOC__`. What leaves its text: links, external links with a label, bold and
italic, headings, list items, other HTML tags.

It refuses nothing: markup it does not know stays in the text as it is. Templates are never
expanded, so a sentence that gets its words from one (`{{convert|5|km}}`) loses them.
"""

import html
import re

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_EMPTY_REF = re.compile(r"<ref\b[^<>]*/>", re.IGNORECASE)
_BLOCK = re.compile(r"<(ref|gallery|math|timeline)\b[^<>]*>.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"^\{\|.*?^\|\}", re.DOTALL | re.MULTILINE)
_INNER_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_OUTER_LINK = re.compile(r"\[(?:https?:)?//[^\s\]]+(?:\s+([^\]]*))?\]")
_QUOTES = re.compile(r"'{2,5}")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_SWITCH = re.compile(r"__[A-Z]+__")
_HEADING = re.compile(r"^(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*$", re.MULTILINE)
_LIST_MARK = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
_BLANKS = re.compile(r"[ \t\u00a0]+")
_GAP = re.compile(r"\s*\n\s*\n\s*")

#: Links that show a picture or put the page into a category: no text of the article.
_NOT_TEXT = ("file:", "image:", "category:")


def to_plain_text(wikitext: str) -> str:
    """Returns the article's text, paragraphs and headings apart by one empty line.

    Text without markup comes back as it was but for its white space; the empty string stays empty.
    """
    text = _COMMENT.sub("", wikitext)
    text = _BLOCK.sub("", _EMPTY_REF.sub("", text))
    text = _TABLE.sub("", _until_stable(_TEMPLATE, "", text))
    text = _OUTER_LINK.sub(r"\1", _links_to_text(text))
    text = _SWITCH.sub("", _QUOTES.sub("", _TAG.sub("", text)))
    text = _LIST_MARK.sub("", _HEADING.sub(r"\n\2\n", text))
    return _tidy(html.unescape(text))


def _links_to_text(text: str) -> str:
    """Replaces links from the innermost outwards, as a picture's caption may hold links."""
    while True:
        replaced = _INNER_LINK.sub(lambda link: _label(link[1]), text)
        if replaced == text:
            return text
        text = replaced


def _label(link: str) -> str:
    """Returns what a reader sees of `[[link]]`: the part after the last bar, else the target."""
    if link.lstrip().lower().startswith(_NOT_TEXT):
        return ""
    target, bar, label = link.rpartition("|")
    return label if bar else (target or label).removeprefix(":")


def _until_stable(pattern: re.Pattern[str], replacement: str, text: str) -> str:
    """Replaces until nothing matches: a pattern for the innermost pair so removes nested ones."""
    count = 1
    while count:
        text, count = pattern.subn(replacement, text)
    return text


def _tidy(text: str) -> str:
    """Makes every run of blanks one space and every run of empty lines one empty line."""
    lines = (_BLANKS.sub(" ", line).strip() for line in text.splitlines())
    return _GAP.sub("\n\n", "\n".join(lines)).strip()

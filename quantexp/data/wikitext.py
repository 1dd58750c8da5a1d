"""Converts wikitext to plain text, by mwparserfromhell.

Dropped: comments, `<ref>`, `<gallery>`, `<math>`, `<timeline>` and similar tags with their content, templates `{{...}}`
(nested ones too), tables `{|...|}`, files, images and categories, behaviour switches such as `__NOTOC__`. Reduced to
their text: links, external links with a label, bold and italic, headings, list items, other HTML tags.

Unclosed markup stays in the text. Templates are never expanded, so a sentence whose words come from one
(`{{convert|5|km}}`) loses them. The time is linear in the text (see `unclosed`).
"""

import re
from functools import cache
from typing import Any

from quantexp.data.unclosed import restored, without_costly_marks

_SWITCH = re.compile(r"__[A-Z]+__")
_BLANKS = re.compile(r"[ \t\u00a0]+")
_GAP = re.compile(r"\n{2,}")
_HEADING = re.compile(r"^(=[^\n]+=)[ \t]*$", re.MULTILINE)

#: Tags that are dropped with their content, in addition to those that the library calls invisible.
_NOT_TEXT_TAGS = frozenset({"ref", "references", "table", "ce", "chem", "hiero", "syntaxhighlight"})
#: Links that show a picture or assign a category: not text of the article.
_NOT_TEXT_LINKS = ("file:", "image:", "category:")
#: Markup characters; a text without them is plain text.
_MARKS = ("{", "[", "<", "&", "''", "==", "__", "\n*", "\n#", "\n:", "\n;")


def to_plain_text(wikitext: str) -> str:
    """Returns the article's text, with one empty line between paragraphs and headings.

    Text without markup is unchanged except for white space; the empty string stays empty.

    Raises:
        ValueError: mwparserfromhell fails on the text.
        RecursionError: its constructs are nested too deeply.
    """
    if not any(mark in f"\n{wikitext}" for mark in _MARKS):
        return _tidy(wikitext)
    text = without_costly_marks(_HEADING.sub(r"\n\n\1\n\n", wikitext))
    try:
        nodes = _library().parse(text).nodes
    except RecursionError:
        raise
    except Exception as error:  # for some markup it raises errors of its own or of Python
        raise ValueError(f"mwparserfromhell fails on it: {error}") from error
    kept = [_text(node) for node in nodes]
    return _tidy(_SWITCH.sub("", restored("".join(kept))))


@cache
def _library() -> Any:
    """Imported on first use: the import takes a tenth of a second."""
    import mwparserfromhell

    return mwparserfromhell


def _text(node: Any) -> str:
    """Returns the visible text of one node."""
    match type(node).__name__:
        case "Text":
            return str(node.value)
        case "Wikilink":
            return _link(node)
        case "Tag":
            return _tag(node)
        case "Heading":
            return _texts(node.title).strip()
        case "ExternalLink":
            return _texts(node.title) if node.title is not None or node.brackets else str(node.url)
        case "HTMLEntity":
            return _entity(node)
        case _:
            return ""


def _entity(node: Any) -> str:
    try:
        return str(node.normalize())
    except (ValueError, OverflowError):  # not the number of a character
        return str(node)


def _texts(code: Any) -> str:
    return "" if code is None else "".join(_text(node) for node in code.nodes)


def _link(node: Any) -> str:
    """Returns a link's label, else its target."""
    target = str(node.title)
    if target.lstrip().lower().startswith(_NOT_TEXT_LINKS):
        return ""
    if node.text is None:
        return target.removeprefix(":")
    return _texts(node.text)


def _tag(node: Any) -> str:
    name = str(node.tag).strip().lower()
    if name in _NOT_TEXT_TAGS or not _library().definitions.is_visible(name):
        return ""
    if name == "nowiki":
        return "" if node.contents is None else str(node.contents)
    return _texts(node.contents)


def _tidy(text: str) -> str:
    """Reduces every run of blanks to one space and every run of empty lines to one empty line."""
    lines = (_BLANKS.sub(" ", line).strip() for line in text.splitlines())
    return _GAP.sub("\n\n", "\n".join(lines)).strip()

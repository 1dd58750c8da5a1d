"""Converts wikitext to plain text, by mwparserfromhell.

Dropped: comments, `<ref>`, `<gallery>`, `<math>`, `<timeline>` and similar tags with their content, templates `{{...}}`
(nested ones too), tables `{|...|}`, files, images and categories, links to other languages, behaviour switches such as
`__NOTOC__`, in the language of the wiki. Reduced to their text: other links, external links with a label, bold and
italic, headings, list items, other HTML tags, and words in variants of a language (`-{...}-`) to the first.

Unclosed markup stays in the text. Templates are never expanded, so a sentence whose words come from one
(`{{convert|5|km}}`) loses them. The time may be far from linear in the text (see `page_parser`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quantexp.data.wiki_names import ENGLISH, Wiki

#: `__NOTOC__` in any language: `__KEIN_INHALTSVERZEICHNIS__`, `__目次非表示__`.
_SWITCH = re.compile(r"__(?!_)([^\s\d\[\]{}<>|()\"'.,;:=/\\]+?)__")
#: A word in variants; the flags of those that are not shown (rules, titles); the code of one.
_VARIANTS = re.compile(r"-\{(?:([^{}|]*)\|)?([^{}]*)\}-")
_HIDDEN_VARIANTS = frozenset("HT-")
_CODE_OF_VARIANT = re.compile(r"\s*[a-z]{2,3}(-[a-z]+)*\s*")
_BLANKS = re.compile(r"[ \t\u00a0]+")
_GAP = re.compile(r"\n{2,}")
_HEADING = re.compile(r"^(=[^\n]+=)[ \t]*$", re.MULTILINE)

#: Tags that are dropped with their content, in addition to those that the library calls invisible.
_NOT_TEXT_TAGS = frozenset({"ref", "references", "table", "ce", "chem", "hiero", "syntaxhighlight"})
#: Tags of code.
_CODE_TAGS = frozenset({"code", "kbd", "pre", "samp", "tt", "var"})
_MARKS = ("{", "[", "<", "&", "''", "==", "__", "\n*", "\n#", "\n:", "\n;")


def to_plain_text(wikitext: str, wiki: Wiki = ENGLISH) -> str:
    """Returns the text of an article of a wiki, with one empty line between paragraphs and headings.

    Text without markup is unchanged except for white space; the empty string stays empty.

    Raises:
        ValueError: mwparserfromhell fails on the text.
        RecursionError: its constructs are nested too deeply.
    """
    if not has_markup(wikitext):
        return _tidy(wikitext)
    try:
        nodes = _library().parse(_HEADING.sub(r"\n\n\1\n\n", wikitext)).nodes
    except RecursionError:
        raise
    except Exception as error:  # for some markup it raises errors of its own or of Python
        raise ValueError(f"mwparserfromhell fails on it: {error}") from error
    text = _Reader(wiki).of(nodes)
    return _tidy(_VARIANTS.sub(_first_variant, text) if wiki.has_variants else text)


def has_markup(wikitext: str) -> bool:
    """Whether a text may have markup; one without is plain text."""
    return any(mark in f"\n{wikitext}" for mark in _MARKS)


@cache
def _library() -> Any:
    """Imported on first use: the import takes a tenth of a second."""
    import mwparserfromhell

    return mwparserfromhell


@dataclass(frozen=True)
class _Reader:
    """Returns the visible text of nodes."""

    wiki: Wiki
    #: Whether the nodes are code, in which `__A__` is no switch.
    is_code: bool = False

    def of(self, nodes: Iterable[Any]) -> str:
        """Returns the text of nodes after each other."""
        return "".join(map(self._text, nodes))

    def _text(self, node: Any) -> str:
        match type(node).__name__:
            case "Text":
                value = str(node.value)
                return value if self.is_code else _SWITCH.sub(_of_switch, value)
            case "Wikilink":
                return self._link(node)
            case "Tag":
                return self._tag(node)
            case "Heading":
                return self._texts(node.title).strip()
            case "ExternalLink":
                if node.title is not None or node.brackets:
                    return self._texts(node.title)
                return str(node.url)
            case "HTMLEntity":
                return _entity(node)
            case _:
                return ""

    def _texts(self, code: Any) -> str:
        return "" if code is None else self.of(code.nodes)

    def _link(self, node: Any) -> str:
        """Returns a link's label, else its target."""
        target = str(node.title)
        if self.wiki.hides(target):
            return ""
        if node.text is None:
            return target.removeprefix(":")
        return self._texts(node.text)

    def _tag(self, node: Any) -> str:
        name = str(node.tag).strip().lower()
        if name in _NOT_TEXT_TAGS or not _library().definitions.is_visible(name):
            return ""
        if name == "nowiki":
            return "" if node.contents is None else str(node.contents)
        return (replace(self, is_code=True) if name in _CODE_TAGS else self)._texts(node.contents)


def _first_variant(match: re.Match[str]) -> str:
    """Returns the first of the variants of a word; nothing where they are only a rule for the page."""
    flags, content = match[1] or "", match[2]
    if not _HIDDEN_VARIANTS.isdisjoint(map(str.strip, flags.split(";"))):
        return ""
    code, colon, text = content.partition(";")[0].partition(":")
    return text.strip() if colon and _CODE_OF_VARIANT.fullmatch(code) else content


def _of_switch(match: re.Match[str]) -> str:
    """Returns nothing for a word in capitals, or in letters that have none, else the text itself."""
    word = match[1]
    return "" if word[0].isalpha() and word == word.upper() else match[0]


def _entity(node: Any) -> str:
    try:
        return str(node.normalize())
    except (ValueError, OverflowError):  # not the number of a character
        return str(node)


def _tidy(text: str) -> str:
    """Reduces every run of blanks to one space and every run of empty lines to one empty line."""
    lines = (_BLANKS.sub(" ", line).strip() for line in text.splitlines())
    return _GAP.sub("\n\n", "\n".join(lines)).strip()

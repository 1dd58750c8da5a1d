"""Records of raw text: each is a document, or the reason why it is not.

Supported are pages of a MediaWiki XML export (Wikipedia's dumps), lines of JSON (Dolma: `id`, `text`, `source`;
WikiExtractor: `id`, `title`, `text`) and rows of a table (`wikimedia/wikipedia` as parquet: `id`, `title`, `text`).
Only the text is required.

Nothing is repaired. An unreadable record is rejected, with its position and the reason. A record that is not a document
(a redirect, a talk page, an empty text) is left out.
"""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from quantexp.data.page_parser import page_text
from quantexp.data.wiki_names import ENGLISH, Wiki
from quantexp.folders import is_text

#: Bytes that may precede the first record of a file: a byte-order mark and blanks.
BLANKS = b"\xef\xbb\xbf \t\r\n"
#: What a redirect without `<redirect>` begins with, in any language: `#WEITERLEITUNG [[Eulen]]`. Nothing follows it.
_REDIRECT = re.compile(r"\s*[#\uff03][^\s\[\]#*:]+\s*:?\s*\[\[[^\[\]]+\]\]")
#: Reasons for leaving out a record.
REDIRECT, NAMESPACE, EMPTY = "redirect", "other namespace", "empty"


@dataclass(frozen=True)
class Document:
    """One article, page or snippet, as plain text."""

    #: The source's identifier: the page's number, or Dolma's `id`; empty if the record has none.
    id: str
    #: Never empty.
    text: str
    #: Dolma's `source`; the dataset's name if the records have none.
    source: str
    #: Empty if the source has none.
    title: str = ""
    #: The first line of its record, or the row, from 1.
    place: int = field(default=0, compare=False)


@dataclass(frozen=True)
class LeftOut:
    """A readable record that is not a document."""

    reason: str


@dataclass(frozen=True)
class Rejected:
    """An unreadable record."""

    #: Its first line, or the row, from 1.
    place: int
    reason: str


Record = Document | LeftOut | Rejected


def read_pages(data: bytes, first_line: int, wiki: Wiki = ENGLISH) -> Iterator[Record]:
    """Yields one record for each complete `<page>` of a piece of an XML export, of this wiki.

    Articles are the pages of namespace 0 that are not redirects; the last of several revisions counts.
    """
    line, begin = first_line, 0
    while (start := data.find(b"<page>", begin)) >= 0:
        end = data.index(b"</page>", start) + len(b"</page>")
        line += data.count(b"\n", begin, start)
        try:
            yield _article(ET.fromstring(data[start:end]), line, wiki)
        except ET.ParseError as error:
            reason = f"malformed XML: {expat.ErrorString(error.code)}"
            yield Rejected(line + error.position[0] - 1, reason)
        except RecursionError:
            yield Rejected(line, "wikitext nested too deeply")
        except ValueError as error:
            yield Rejected(line, f"wikitext: {error}")
        line += data.count(b"\n", start, end)
        begin = end


def read_lines(data: bytes, first_line: int, name: str) -> Iterator[Record]:
    """Yields one record per non-blank line; `name` is the source of records without one.

    A line may begin with a byte-order mark, as in files that were joined.
    """
    for number, line in enumerate(data.split(b"\n"), start=first_line):
        if record := line.lstrip(BLANKS):
            yield _json_record(record, number, name)


def row_record(row: Mapping[str, Any], number: int, name: str) -> Record:
    """Returns the record of a table's row, or of a JSON object."""
    text = row.get("text")
    if not isinstance(text, str):
        problem = "it is missing" if "text" not in row else f"got {text!r:.40}"
        return Rejected(number, f"`text` must be a string, {problem}")
    if not is_text(text):
        return Rejected(number, "`text` has half a surrogate pair, which is no character")
    if not text.strip():
        return LeftOut(EMPTY)
    source, title = row.get("source"), row.get("title", _title(row.get("metadata")))
    name_of_record = row.get("id")
    return Document(
        id="" if name_of_record is None else str(name_of_record),
        text=text,
        source=source if isinstance(source, str) else name,
        title=title if isinstance(title, str) else "",
        place=number,
    )


def _article(page: ET.Element, place: int, wiki: Wiki) -> Record:
    if page.find("redirect") is not None:
        return LeftOut(REDIRECT)
    if page.findtext("ns") != "0":
        return LeftOut(NAMESPACE)
    revisions = page.findall("revision/text")
    wikitext = revisions[-1].text or "" if revisions else ""
    redirect = _REDIRECT.match(wikitext)
    if redirect and not page_text(wikitext[redirect.end() :], wiki):
        return LeftOut(REDIRECT)
    text = page_text(wikitext, wiki)
    if not text:
        return LeftOut(EMPTY)
    title = page.findtext("title", "")
    return Document(page.findtext("id", ""), text, "wikipedia", title, place)


def _json_record(line: bytes, number: int, name: str) -> Record:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Rejected(number, f"no UTF-8: byte {error.start + 1} of the line")
    except ValueError as error:
        return Rejected(number, f"malformed JSON: {error}")
    except RecursionError:
        return Rejected(number, "malformed JSON: nested too deeply")
    if not isinstance(row, dict):
        return Rejected(number, f"must be a JSON object, got {type(row).__name__}")
    try:
        return row_record(row, number, name)
    except RecursionError:
        return Rejected(number, "a field is nested too deeply")


def _title(metadata: object) -> object:
    return metadata.get("title") if isinstance(metadata, dict) else None

"""Readers of raw text: a MediaWiki XML export (Wikipedia) and Dolma's JSON lines.

Both stream: memory is that of one article, whatever the size of the file. A file whose name ends
in `.bz2` or `.gz`, as the dumps are published, is unpacked while it is read. A document without
text is left out.

They refuse, with the file and the line, what is not well-formed; they repair nothing.
"""

import bz2
import gzip
import json
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from xml.parsers import expat

from quantexp.data.wikitext import to_plain_text
from quantexp.errors import DataError


@dataclass(frozen=True)
class Document:
    """One article, page or snippet, as plain text."""

    #: What the source calls it: the page's number, or Dolma's `id`.
    id: str
    #: Never empty.
    text: str
    #: "wikipedia", or Dolma's `source`.
    source: str
    #: Empty where the source has none.
    title: str = ""


def read_wikipedia(path: Path) -> Iterator[Document]:
    """Yields the articles of a MediaWiki XML export, in the file's order.

    Articles are the pages of namespace 0 that are no redirects; of several revisions the last one
    counts.

    Raises:
        DataError: no such file, not well-formed XML (naming the line), or no MediaWiki export.
    """
    with _opened(path) as stream:
        try:
            for page in _pages(path, stream):
                document = _article(page)
                if document is not None:
                    yield document
        except ET.ParseError as error:
            raise DataError(
                f"{path}, line {error.position[0]}: malformed XML: "
                f"{expat.ErrorString(error.code)}; give a complete MediaWiki export "
                "(pages-articles) as dataset.path"
            ) from error


def read_dolma(path: Path) -> Iterator[Document]:
    """Yields the documents of a Dolma file: one JSON object a line with `id`, `text` and `source`.

    Empty lines are skipped. The title is `metadata.title` where there is one.

    Raises:
        DataError: no such file, or a line (named) that is not such an object.
    """
    with _opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                document = _parse_dolma_line(line, f"{path}, line {number}")
                if document.text.strip():
                    yield document


def _pages(path: Path, stream: BufferedIOBase) -> Iterator[ET.Element]:
    """Yields each `<page>` once it is complete and forgets it afterwards."""
    root: ET.Element | None = None
    for event, element in ET.iterparse(stream, events=("start", "end")):
        if root is None:
            root = element
            if _local_name(root) != "mediawiki":
                raise DataError(
                    f"{path}: not a MediaWiki export: its root element is <{_local_name(root)}>, "
                    "not <mediawiki>"
                )
        elif event == "end" and _local_name(element) == "page":
            yield element
            root.clear()


def _local_name(element: ET.Element) -> str:
    """Returns the tag without its namespace, which names the export's version and so varies."""
    return element.tag.rpartition("}")[2]


def _article(page: ET.Element) -> Document | None:
    """Returns the page's plain text, or None for a redirect, another namespace or an empty page."""
    if page.findtext("{*}ns") != "0" or page.find("{*}redirect") is not None:
        return None
    revisions = page.findall("{*}revision/{*}text")
    text = to_plain_text(revisions[-1].text or "") if revisions else ""
    if not text:
        return None
    return Document(
        id=page.findtext("{*}id", ""),
        text=text,
        source="wikipedia",
        title=page.findtext("{*}title", ""),
    )


def _parse_dolma_line(line: bytes, where: str) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: malformed JSON: {error}; Dolma has one object a line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: must be a JSON object, got {type(record).__name__}")
    for key in ("id", "text", "source"):
        if not isinstance(record.get(key), str):
            raise DataError(f"{where}: `{key}` must be a string, got {record.get(key)!r:.40}")
    if not _is_unicode(record["text"]):
        raise DataError(f"{where}: `text` has half a surrogate pair, which is no character")
    return Document(
        id=record["id"],
        text=record["text"],
        source=record["source"],
        title=_title(record.get("metadata")),
    )


def _title(metadata: object) -> str:
    title = metadata.get("title") if isinstance(metadata, dict) else None
    return title if isinstance(title, str) else ""


def _is_unicode(text: str) -> bool:
    r"""Returns whether the text has a UTF-8 form; JSON's \ud800 alone has none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    """Opens a file for reading, unpacked by its suffix.

    Raises:
        DataError: it cannot be opened, or its compressed data ends early or is damaged.
    """
    try:
        with _open(path) as stream:
            yield stream
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; give the raw text as dataset.path") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> BufferedIOBase:
    if path.suffix == ".bz2":
        return bz2.open(path, "rb")
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return path.open("rb")

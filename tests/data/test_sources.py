import bz2
import gzip
import json
from pathlib import Path

import pytest

from quantexp.data.sources import Document, read_dolma, read_wikipedia
from quantexp.errors import DataError

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-{}/"><siteinfo/>'


def page(
    title: str = "Owl", ns: str = "0", page_id: str = "7", body: str = "", text: str = "An [[owl]]."
) -> str:
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>{page_id}</id>{body}"
        f"<revision><id>99</id><text>{text}</text></revision></page>"
    )


def dump(*pages: str, version: str = "0.11") -> str:
    return HEAD.format(version) + "".join(pages) + "</mediawiki>"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def dolma(**fields: object) -> str:
    return json.dumps({"id": "a", "text": "b", "source": "c"} | fields)


@pytest.mark.parametrize("version", ["0.10", "0.11"])
def test_an_article_has_its_page_number_title_and_plain_text(tmp_path: Path, version: str) -> None:
    path = write(tmp_path / "a.xml", dump(page(), version=version))
    assert list(read_wikipedia(path)) == [Document("7", "An owl.", "wikipedia", "Owl")]


def test_redirects_other_namespaces_and_empty_pages_are_left_out(tmp_path: Path) -> None:
    pages = (
        page(page_id="1", body='<redirect title="Owl"/>'),
        page(page_id="2", ns="1"),
        page(page_id="3", text=""),
        page(page_id="4", text="{{only a template}}"),
        "<page><title>no revision</title><ns>0</ns><id>5</id></page>",
        page(page_id="6"),
    )
    documents = read_wikipedia(write(tmp_path / "a.xml", dump(*pages)))
    assert [document.id for document in documents] == ["6"]


def test_the_last_of_several_revisions_counts(tmp_path: Path) -> None:
    older = "<revision><text>older</text></revision>"
    path = write(tmp_path / "a.xml", dump(page(body=older, text="newer")))
    assert [document.text for document in read_wikipedia(path)] == ["newer"]


@pytest.mark.parametrize(("suffix", "compress"), [(".bz2", bz2.compress), (".gz", gzip.compress)])
def test_a_compressed_file_is_unpacked_and_a_cut_one_refused(
    tmp_path: Path, suffix: str, compress: object
) -> None:
    packed = compress((dolma() + "\n").encode() * 100)  # type: ignore[operator]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    assert len(list(read_dolma(path))) == 100
    path.write_bytes(packed[:-10])
    with pytest.raises(DataError, match=rf"a\.jsonl\{suffix}: cannot be read: .*end"):
        list(read_dolma(path))


def test_malformed_xml_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", dump("\n", page(), "\n<page></wrong>"))
    reader = read_wikipedia(path)
    assert next(reader).title == "Owl"
    with pytest.raises(DataError, match=r"a\.xml, line 3: malformed XML: mismatched tag"):
        next(reader)


def test_a_dump_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", HEAD.format("0.11") + page())
    with pytest.raises(DataError, match=r"line 1: malformed XML: no element found"):
        list(read_wikipedia(path))


def test_xml_that_is_no_export_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", "<html><p/></html>")
    with pytest.raises(DataError, match="not a MediaWiki export: its root element is <html>"):
        list(read_wikipedia(path))


@pytest.mark.parametrize("read", [read_wikipedia, read_dolma])
def test_a_missing_file_is_refused_with_the_remedy(tmp_path: Path, read: object) -> None:
    with pytest.raises(DataError, match=r"none: no such file; give the raw text as dataset\.path"):
        list(read(tmp_path / "none"))  # type: ignore[operator]


def test_a_folder_cannot_be_read_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_dolma(tmp_path))


def test_dolma_lines_become_documents_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    lines = (dolma(), "", dolma(text=" "), dolma(id="d", metadata={"title": "e"}), "")
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert list(read_dolma(path)) == [Document("a", "b", "c"), Document("d", "b", "c", "e")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: malformed JSON: .*; Dolma has one object a line"),
        ("[]", "line 2: must be a JSON object, got list"),
        (dolma(text=None), "line 2: `text` must be a string, got None"),
        (dolma(id=5), "line 2: `id` must be a string, got 5"),
        ('{"id": "a", "text": "b"}', "line 2: `source` must be a string, got None"),
        (dolma(text="\ud800"), "line 2: `text` has half a surrogate pair"),
    ],
)
def test_a_bad_dolma_line_is_refused_with_file_and_line(
    tmp_path: Path, line: str, words: str
) -> None:
    path = write(tmp_path / "a.jsonl", f"{dolma()}\n{line}\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, {words}"):
        list(read_dolma(path))


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 1: malformed JSON"):
        list(read_dolma(path))

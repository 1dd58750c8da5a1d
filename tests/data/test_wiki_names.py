"""Small dumps of wikis in several languages: what a reader does not see of an article is no text of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.data.prepare.inputs import find_inputs
from quantexp.data.prepare.shards import read_shards, records
from quantexp.data.sources import REDIRECT, Document, LeftOut, Record
from quantexp.data.wiki_names import wiki_of
from quantexp.data.wikitext import to_plain_text
from quantexp.errors import DataError

from .prepare.made import dump, prepared

#: Code -> names of the namespaces 6 and 14, beginning of a redirect, switch, a word. From MediaWiki's messages.
WIKIS = {
    "ar": ("ملف", "تصنيف", "#تحويل", "__لا_فهرس__", "بومة"),
    "de": ("Datei", "Kategorie", "#WEITERLEITUNG", "__KEIN_INHALTSVERZEICHNIS__", "Eule"),
    "fr": ("Fichier", "Catégorie", "#REDIRECTION", "__AUCUNSOMMAIRE__", "Chouette"),
    "hi": ("चित्र", "श्रेणी", "#अनुप्रेषित", "__विषय_सूची_हीन__", "उल्लू"),
    "ja": ("ファイル", "Category", "\uff03転送", "__目次非表示__", "フクロウ"),
    "ru": ("Файл", "Категория", "#перенаправление", "__БЕЗ_ОГЛАВЛЕНИЯ__", "Сова"),
    "vi": ("Tập tin", "Thể loại", "#đổi", "__KHÔNG_MỤC_LỤC__", "Cú"),
}


def dump_of(code: str, articles: list[str]) -> bytes:
    file, category, *_ = WIKIS[code]
    own = {"-2": "Media", "-1": "Special", "4": "Wikipedia", "6": file, "14": category}
    names = "".join(f'<namespace key="{key}">{name}</namespace>' for key, name in own.items())
    site = f"<namespaces><namespace key='0' />{names}</namespaces></siteinfo>"
    return dump(articles).replace(b"</siteinfo>", site.encode())


def read(path: Path, content: bytes) -> list[Record]:
    path.write_bytes(content)
    (item,) = find_inputs(str(path))
    own = [record for shard in read_shards(item) for record in records(shard, "x")]
    return own[2:]  # after the redirect and the talk page of `dump`


@pytest.mark.parametrize("code", WIKIS)
def test_files_categories_languages_and_switches_are_no_text(tmp_path: Path, code: str) -> None:
    file, category, _, switch, word = WIKIS[code]
    article = (
        f"{switch}\n[[{file}:{word}.jpg|mini|x [[{word}]]]]\n'''{word}''' [[{word}|a]] [[:{category}:{word}]].\n"
        f"[[{file.upper()}: {word}.svg]][[\u200f{category.replace(' ', '_')}_:{word}|x]][[File:x.png]][[Image:x.png]]\n"
        f"[[Category:{word}]]\n[[simple:x]]\n[[zh-min-nan:{word}]] [[EN:{word}|x]]"
    )
    (document,) = read(tmp_path / "a.xml", dump_of(code, [article]))
    assert isinstance(document, Document)
    assert document.text == f"{word} a {category}:{word}."


@pytest.mark.parametrize("code", WIKIS)
def test_a_redirect_in_any_language_is_no_article(tmp_path: Path, code: str) -> None:
    _, category, redirect, switch, word = WIKIS[code]
    articles = [
        f"{redirect} [[{word}]]",
        f"{redirect}: [[{word}#x|y]]\n{{{{x}}}}\n[[{category}:{word}]]\n{switch}",
        f"{redirect.upper()}[[{word}]]",
        f"# {word} [[{word}]]\n# x",
        f"#{word} [[{word}]] {word}",
    ]
    own = read(tmp_path / "a.xml", dump_of(code, articles))
    assert own[:3] == [LeftOut(REDIRECT)] * 3
    assert [type(record) for record in own[3:]] == [Document] * 2


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("[[Bild:Eule.JPG|mini|x]]a [[Bild:Eule]]", "a Bild:Eule"),
        ("[[Medium:Ruf.ogg|Ruf]] [[Media:Ruf.ogg|Ruf]]", "Ruf Ruf"),
        ("[[KATEGORİ:Kuş]]a [[Kategori:x]]İ", "a İ"),
        ("[[Star Trek: Picard]] [[wikt:Eule|Eule]] [[:en:Owl]]", "Star Trek: Picard Eule en:Owl"),
        ("[[Wikipedia:Hilfe|Hilfe]] [[commons:File:a.jpg|Bild]]", "Hilfe Bild"),
        ("a __init__ <code>__VA_ARGS__</code> <nowiki>__TOC__</nowiki> ____ b", None),
    ],
)
def test_other_links_and_underscores_stay(wikitext: str, text: str | None) -> None:
    names = '<namespace key="-2">Medium</namespace><namespace key="14">Kategori</namespace>'
    kept = to_plain_text(wikitext, wiki_of(f"<siteinfo>{names}</siteinfo>".encode()))
    assert kept == (text or "a __init__ __VA_ARGS__ __TOC__ ____ b")


def test_the_names_of_each_file_are_its_own_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for code in ("de", "ru"):
        file, word = WIKIS[code][0], WIKIS[code][-1]
        content = dump_of(code, [f"[[{file}:x]]{word}"])
        (tmp_path / "raw" / f"{code}.xml").write_bytes(content)
    card = prepared(tmp_path / "raw", tmp_path / "own", split="1", num_workers=2).card
    assert card.num_tokens[0] == len(b"Eule") + 1 + len("Сова".encode()) + 1


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("-{zh-hans:计算机; zh-hant:電腦}-是", "计算机是"),
        ("-{A|zh-cn:[[软件]];zh-tw:軟體}-", "软件"),
        ("a-{H|zh-cn:软件;zh-tw:軟體}--{T|zh:x}--{-|zh:x}-b", "ab"),
        ("-{R|原文: x}- -{原文}- -{zh;zh-tw|字}-", "原文: x 原文 字"),
    ],
)
def test_of_a_word_in_variants_the_first_is_text(wikitext: str, text: str) -> None:
    head = b'<mediawiki version="0.11" xml:lang="%s"><siteinfo></siteinfo>'
    assert to_plain_text(wikitext, wiki_of(head % b"zh-Hans")) == text
    assert "-{" in to_plain_text(wikitext, wiki_of(head % b"en"))


def test_a_malformed_head_is_refused(tmp_path: Path) -> None:
    content = dump(["x"]).replace(b"<sitename>", b"<sitename")
    with pytest.raises(DataError, match=r"a\.xml: malformed <siteinfo>: .*; download or copy"):
        read(tmp_path / "a.xml", content)

"""Raw text in published forms, created here: dumps, extracted lines, shards, tables."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from rich.console import Console

from quantexp.data.prepare.job import make_job
from quantexp.data.prepare.run import Prepared, prepare
from quantexp.schema.dataset import DatasetConfig, PrepareConfig, TokenizerKind

WORDS = ["an", "owl", "hunts", "at", "night", "over", "fields", "of", "barley", "while", "rivers"]


def texts(number: int, seed: int = 0, most: int = 120) -> list[str]:
    """Texts without markup; some with letters of several bytes."""
    chance = random.Random(seed)
    return [
        f"{i} " + " ".join(chance.choices([*WORDS, "zwölf", "景德鎮"], k=chance.randint(1, most)))
        for i in range(number)
    ]


def rows(contents: Sequence[str], source: str = "web") -> list[dict[str, Any]]:
    """Dolma's fields."""
    return [
        {"id": f"{source}-{i}", "text": text, "source": source, "added": "2024-01-01"}
        for i, text in enumerate(contents)
    ]


def lines(records: Sequence[dict[str, Any]]) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def dump(contents: Sequence[str]) -> bytes:
    """A MediaWiki export: articles, and among them a redirect and a talk page."""
    others = (
        '  <page>\n    <title>R</title>\n    <ns>0</ns>\n    <id>900</id>\n    <redirect title="A" />\n  </page>\n'
        "  <page>\n    <title>Talk:A</title>\n    <ns>1</ns>\n    <id>901</id>\n  </page>\n"
    )
    pages = "".join(
        f"  <page>\n    <title>Title {i}</title>\n    <ns>0</ns>\n    <id>{i}</id>\n    <revision>\n      "
        f'<id>{i + 5000}</id>\n      <text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>\n'
        "    </revision>\n  </page>\n"
        for i, text in enumerate(contents)
    )
    head = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n'
        "  <siteinfo>\n    <sitename>Wikipedia</sitename>\n  </siteinfo>\n"
    )
    return f"{head}{others}{pages}</mediawiki>\n".encode()


def multistream(content: bytes) -> bytes:
    """Packed like the multistream dumps: head, pages and tail each in their own bzip2 stream."""
    first, last = content.index(b"  <page>"), content.rindex(b"</mediawiki>")
    middle = content[first:last]
    cut = middle.index(b"  <page>", len(middle) // 2)
    pieces = (content[:first], middle[:cut], middle[cut:], content[last:])
    return b"".join(bz2.compress(piece) for piece in pieces)


def zstd_of_one_byte(byte: bytes, count: int) -> bytes:
    """One frame with the largest window, 2 GiB, in which each block repeats a byte 131,072 times (RFC 8878, 3.1.1)."""
    size = 1 << 17
    header = bytes.fromhex("28b52ffd00a8")
    repeats, last = [((size << 3) | (1 << 1) | end).to_bytes(3, "little") + byte for end in (0, 1)]
    return header + repeats * (count // size - 1) + last


def zstd(content: bytes) -> bytes:
    """Two frames, as some tools write them."""
    half = len(content) // 2
    pack = zstandard.ZstdCompressor().compress
    return pack(content[:half]) + pack(content[half:])


def parquet(contents: Sequence[str], path: Path) -> None:
    """wikimedia/wikipedia's columns."""
    columns = {
        "id": [str(i) for i in range(len(contents))],
        "url": ["https://example.org"] * len(contents),
        "title": [f"Title {i}" for i in range(len(contents))],
        "text": list(contents),
    }
    pq.write_table(pa.table(columns), path, row_group_size=100)


def write_forms(folder: Path, contents: Sequence[str]) -> dict[str, Path]:
    """The same texts in every supported form."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = lines(rows(contents))
    extracted = lines([{"id": str(i), "title": f"T{i}", "text": t} for i, t in enumerate(contents)])
    content = dump(contents)
    forms = {
        "pages-articles.xml": content,
        "pages-articles.xml.bz2": bz2.compress(content),
        "pages-articles-multistream.xml.bz2": multistream(content),
        "wiki_00": extracted,
        "wiki_00.bz2": bz2.compress(extracted),
        "shard.jsonl": shard,
        "shard.json.gz": gzip.compress(shard[:1000]) + gzip.compress(shard[1000:]),
        "shard.jsonl.zst": zstd(shard),
    }
    for name, packed in forms.items():
        (folder / name).write_bytes(packed)
    parquet(contents, folder / "train-00000.parquet")
    return {name: folder / name for name in (*forms, "train-00000.parquet")}


def config(source: object, prefix: Path, **changes: Any) -> DatasetConfig:
    """A preparation by bytes."""
    fields: dict[str, Any] = {
        "name": "web",
        "tokenizer": TokenizerKind.byte,
        "num_workers": 1,
    } | changes
    own: dict[str, Any] = {
        key: fields.pop(key) for key in list(fields) if key in PrepareConfig.__dataclass_fields__
    }
    paths = [str(s) for s in source] if isinstance(source, list) else str(source)
    return DatasetConfig(path=str(prefix), source=paths, prepare=PrepareConfig(**own), **fields)


def prepared(source: object, prefix: Path, *, force: bool = False, **changes: Any) -> Prepared:
    """Prepare without output."""
    job = make_job(config(source, prefix, **changes))
    return prepare(job, Console(quiet=True), force=force)


def content_of(prefix: Path) -> dict[str, bytes]:
    """All files of a prepared dataset, by suffix."""
    return {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.glob(f"{prefix.name}*")
        if path.is_file()
    }

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from quantexp.data.binary import pair_paths
from quantexp.data.prepare import finish, shards, unpack
from quantexp.data.prepare.inputs import find_inputs
from quantexp.data.prepare.outputs import read_arrays
from quantexp.errors import DataError

from .made import (
    content_of,
    dump,
    lines,
    multistream,
    parquet,
    prepared,
    rows,
    texts,
    zstd,
    zstd_of_one_byte,
)

GOOD = lines(rows(texts(3)))
BAD = b'{"id": 1\n{"id": "b"}\n{"text": "\xff"}\n[1]\n'


def nothing_whole(prefix: Path) -> bool:
    """No file of a result exists."""
    return not any(path.exists() for path in (*pair_paths(prefix), Path(f"{prefix}.json")))


def test_records_that_cannot_be_read_are_counted_and_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + BAD + GOOD)
    card = prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1", max_rejected=4).card
    assert sum(card.num_documents) == 6
    assert card.report["num_rejected"] == 4
    listed = [json.loads(x) for x in (tmp_path / "own.rejected.jsonl").read_text().splitlines()]
    assert [row["line"] for row in listed] == [4, 5, 6, 7]
    assert {row["file"] for row in listed} == {str(tmp_path / "a.jsonl")}
    assert listed[1]["reason"] == "`text` must be a string, it is missing"


def test_too_many_rejected_records_end_it_and_a_higher_limit_continues(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + BAD + GOOD)
    words = (
        r"4 records cannot be read, more than dataset\.prepare\.max_rejected=3; the last: .*a\.jsonl, line 7: "
        r"must be a JSON object, got list; all of them in .*too_many_rejected\.jsonl: fix the input"
    )
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", max_rejected=3)
    assert nothing_whole(tmp_path / "own")
    assert len((tmp_path / "own.partial" / "too_many_rejected.jsonl").read_text().splitlines()) == 4
    prepared(tmp_path / "a.jsonl", tmp_path / "own", max_rejected=4)
    assert not nothing_whole(tmp_path / "own")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.json.gz",
            gzip.compress(GOOD, mtime=0)[:-9],
            r"a\.json\.gz: cut short: its gzip data has no end",
        ),
        ("a.xml.bz2", bz2.compress(dump(texts(3)))[:-9], r"a\.xml\.bz2: cut short: its bzip2 data"),
        ("a.jsonl.zst", zstd(GOOD)[:-3], r"a\.jsonl\.zst: cut short: its zstd data has no end"),
        ("a.jsonl.zst", zstd(GOOD)[:-9] + bytes(9), r"damaged zstd data near byte .*: download or"),
        ("a.xml.bz2", multistream(dump(texts(3)))[:-60], r"cut short: its bzip2 data has no end"),
        (
            "a.json.gz",
            gzip.compress(GOOD, mtime=0)[:40] + bytes(60),
            r"damaged gzip data near byte 100 of 100",
        ),
        (
            "a.xml",
            dump(texts(9))[:900],
            r"a\.xml: cut short: the XML has no </mediawiki> after line",
        ),
        (
            "a.xml",
            dump(texts(3))[:-14],
            r"a\.xml: cut short: the XML has no </mediawiki> after line",
        ),
    ],
)
def test_a_file_that_is_cut_short_or_damaged_ends_it(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / name, tmp_path / "own")
    assert nothing_whole(tmp_path / "own")


def test_a_cut_parquet_file_ends_it(tmp_path: Path) -> None:
    parquet(texts(300), tmp_path / "a.parquet")
    os.truncate(tmp_path / "a.parquet", 3000)
    with pytest.raises(
        DataError, match=r"a\.parquet: damaged or cut short \(.*\); download or copy"
    ):
        prepared(tmp_path / "a.parquet", tmp_path / "own")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.gz", gzip.compress(b"\n" * (50 << 20), mtime=0)),
        ("a.bz2", bz2.compress(b"\n" * (50 << 20))),
        ("a.zst", zstd(b"\n" * (50 << 20))),
        ("a.zst", zstd_of_one_byte(b"\n", 50 << 20)),
    ],
    ids=["gzip", "bzip2", "zstd", "zstd with a window of 2 GiB"],
)
def test_a_file_that_expands_more_than_text_is_refused_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.setattr(unpack, "_MAX_CONTENT", 40 << 20)
    (tmp_path / name).write_bytes(content)
    sizes = list[int]()
    words = rf"{name}: expands to more than 1,000 times its size, which no text does; give another"
    with pytest.raises(DataError, match=words):
        sizes.extend(len(block) for block, _ in unpack.unpacked(tmp_path / name))
    assert max(sizes) <= 32 << 20
    monkeypatch.setattr(unpack, "_MAX_CONTENT", 1 << 30)
    assert sum(len(block) for block, _ in unpack.unpacked(tmp_path / name)) == 50 << 20


def test_a_line_without_an_end_is_refused_before_memory_is_full(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"{" + bytes(70 << 20), mtime=0))
    with pytest.raises(DataError, match=r"a\.gz: a record is longer than 64 MiB"):
        prepared(tmp_path / "a.gz", tmp_path / "own")


def test_a_table_of_one_long_text_for_many_rows_is_read_in_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary holds the text once; all rows together would take 3 GB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    one = pa.array(["x" * (1 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), one)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    (item,) = find_inputs(str(tmp_path / "a.parquet"))
    first = next(shards.read_shards(item))
    assert first.end <= 72
    monkeypatch.setattr(shards, "MAX_RECORD_BYTES", 1 << 19)
    words = r"a\.parquet: a record is longer than 0 MiB, at most 8 rows before row 9; give another"
    with pytest.raises(DataError, match=words):
        next(shards.read_shards(item))


def test_a_table_that_claims_other_rows_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    parquet(texts(30), tmp_path / "a.parquet")

    class Shorter(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *arguments: Any, **options: Any) -> Any:
            return islice(super().iter_batches(*arguments, **options), 2)

    monkeypatch.setattr(pq, "ParquetFile", Shorter)
    words = r"a\.parquet: damaged: it has 16 rows where its end says 30; download or copy it again"
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.parquet", tmp_path / "own")


def test_a_row_that_is_no_utf8_is_rejected_and_the_others_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array([b"an owl", b"\xff", b"two owls"]).cast(pa.binary())
    text = pa.StringArray.from_buffers(3, column.buffers()[1], column.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    card = prepared(tmp_path / "a.parquet", tmp_path / "own", split="1").card
    assert sum(card.num_documents) == 2
    (row,) = map(json.loads, (tmp_path / "own.rejected.jsonl").read_text().splitlines())
    assert (row["line"], row["reason"]) == (2, "no UTF-8")


def test_a_table_without_text_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": ["1"], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has no column `text`, only id, body; give"):
        prepared(tmp_path / "a.parquet", tmp_path / "own")


def test_a_record_of_many_mebibytes_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    monkeypatch.setattr(shards, "MAX_RECORD_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (3 << 20))
    with pytest.raises(
        DataError, match=r"a\.jsonl: a record is longer than 1 MiB, .* not JSON lines"
    ):
        prepared(tmp_path / "a.jsonl", tmp_path / "own")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "none.xml",
            r"dataset\.source=.*none\.xml: no such file, and no file in a folder or by a pattern",
        ),
        ("other.htm", r"other\.htm: no such file.*; did you mean .*/other\.html\?"),
        ("*.gz", r"dataset\.source=.*\*\.gz: no such file"),
        (
            "other.html",
            r"other\.html: neither a MediaWiki XML export, JSON lines nor parquet .*'<html>",
        ),
        (
            "table.parquet.packed",
            r"table\.parquet\.packed: neither .*; parquet is read unpacked: unpack it",
        ),
        ("wide.jsonl", r"wide\.jsonl: neither .*; it is UTF-16: convert it to UTF-8 first"),
        *(
            (
                f"unmarked.{suffix}",
                r"unmarked\..*: neither .*; it is UTF-16: convert it to UTF-8 first",
            )
            for suffix in ("jsonl", "xml")
        ),
        ("named\udcff", r"dataset\.source must be a path in UTF-8, got '/.*named\\udcff/a\.jsonl'"),
    ],
)
def test_an_unreadable_source_is_refused(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "other.html").write_text("<html></html>")
    (tmp_path / "table.parquet.packed").write_bytes(gzip.compress(b"PAR1"))
    (tmp_path / "wide.jsonl").write_text('{"text": "a"}', "utf-16")
    (tmp_path / "unmarked.jsonl").write_text('{"text": "a"}', "utf-16-le")
    (tmp_path / "unmarked.xml").write_text("<mediawiki></mediawiki>", "utf-16-be")
    (tmp_path / "named\udcff").mkdir()
    (tmp_path / "named\udcff" / "a.jsonl").write_bytes(lines(rows(["a"])))
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / source, tmp_path / "own")
    assert not (tmp_path / "own.partial").exists()


def test_a_working_directory_that_is_no_utf_8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["a"])))
    (tmp_path / "named\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "named\udcff")
    words = (
        r"dataset\.path must be a path in UTF-8, got '/.*named\\udcff/own'; rename it, or choose"
    )
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.jsonl", Path("own"))


@pytest.mark.parametrize("content", [b"", b"\n\n", lines(rows([" ", ""]))])
def test_a_source_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    words = r"the input holds no document to keep \((it is empty|2 empty)\); see dataset\.prepare"
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.jsonl", tmp_path / "own")
    assert nothing_whole(tmp_path / "own")


def test_a_source_of_unreadable_records_alone_is_refused_with_the_first_reason(
    tmp_path: Path,
) -> None:
    """As JSON that is indented, so that no line is a whole record."""
    (tmp_path / "a.jsonl").write_text('{\n "text": "one"\n}\n')
    words = r"no document to keep \(3 rejected, the first: .*a\.jsonl, line 1: .*\); see dataset"
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.jsonl", tmp_path / "own")


def test_text_that_leaves_nothing_for_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["x"])) + b"{\n")
    words = (
        r"no document fell to training, 1 to validation and test \(1 rejected, the first: .*a\.jsonl, line 2: "
        r".*\): give more text"
    )
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", split="0.000001,1")


def test_a_full_disk_ends_it_and_with_space_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(60))))
    whole = prepared(tmp_path / "a.jsonl", tmp_path / "whole" / "x").prefix
    savez, count = np.savez, 0

    def full(stream: IO[bytes], **arrays: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        savez(stream, **arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "savez", full)
    words = r"cannot write .*x\.partial: No space left on device; free space .*: it resumes where it stopped"
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "a.jsonl", tmp_path / "own" / "x")
    assert nothing_whole(tmp_path / "own" / "x")
    monkeypatch.setattr(np, "savez", savez)
    prepared(tmp_path / "a.jsonl", tmp_path / "own" / "x")
    assert content_of(tmp_path / "own" / "x") == content_of(whole)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/own\.partial: Not a directory; free"):
        prepared(tmp_path / "a.jsonl", tmp_path / "file" / "own")


def test_an_output_with_damaged_documents_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)

    def damaged(path: Path, *names: str) -> list[np.ndarray]:
        content = path.read_bytes()
        ids = texts(3)[0].encode()[:4].decode().encode("utf-16-le")
        assert content.count(ids) == 1
        path.write_bytes(content.replace(ids, ids[::-1]))
        return read_arrays(path, *names)

    monkeypatch.setattr(finish, "read_arrays", damaged)
    with pytest.raises(
        DataError, match=r"0{5}-0{13}-\d{13}\.npz: damaged \(Bad CRC-32 .*\): delete it and run the"
    ):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1")

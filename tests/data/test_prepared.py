from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from quantexp.data.binary import pair_paths
from quantexp.data.prepared import card_path, check_intact, hash_of, read_card
from quantexp.errors import DataError

from .prepare.made import lines, prepared, rows, texts


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("card")
    (folder / "a.jsonl").write_bytes(lines(rows(texts(3))))
    prefix = prepared(folder / "a.jsonl", folder / "own", split="1").prefix
    return json.loads(card_path(prefix).read_bytes())


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\0", '{"version": 1' + "1" * 5000 + "}"])
def test_a_card_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    card_path(tmp_path / "own").write_text(text)
    with pytest.raises(DataError, match=r"own\.json, line 1: .*; prepare the dataset"):
        read_card(tmp_path / "own")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"num_documents": [1, 2]}, r"num_documents must be 3 sizes, got \(1, 2\)"),
        ({"num_documents": [0, 0, 0]}, "contradict each other"),
        ({"num_documents": [2, 0, 0]}, "contradict each other"),
        ({"num_tokens": [2, 0, 0]}, "contradict each other"),
        ({"num_bytes": [0, 102]}, "contradict each other"),
        ({"num_bytes": ["1", 2]}, "num_bytes must be 2 sizes"),
        ({"num_tokens": [-1, 0, 0]}, "num_tokens must be 3 sizes"),
        ({"num_tokens": [True, 0, 0]}, "num_tokens must be 3 sizes"),
        ({"hashes": ["a"]}, "not enough values"),
        ({"hashes": 3}, "cannot unpack"),
        ({"hashes": None}, "cannot unpack"),
        ({"split": None}, "a text is of another type"),
        ({"more": 1}, "unexpected keyword"),
        ({"tokenizer": {}}, "missing 5 required"),
    ],
)
def test_a_card_with_other_content_is_refused(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    card_path(tmp_path / "own").write_text(json.dumps(content | changes))
    with pytest.raises(DataError, match=rf"own\.json: no card of this .*{words}.*; prepare the"):
        read_card(tmp_path / "own")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("file", "../../other.json", r"tokenizer\.file must be the name of a file, got \.\./\.\./other"),
        ("kind", "pickle", "'pickle' is not a valid TokenizerKind"),
        ("vocab_size", "9", "tokenizer must be 2 sizes"),
        ("eod_name", 3, "a text is of another type"),
    ],
)  # fmt: skip
def test_a_card_with_another_tokenizer_is_refused(
    tmp_path: Path, content: dict[str, Any], key: str, value: object, words: str
) -> None:
    tokenizer = content["tokenizer"] | {key: value}
    card_path(tmp_path / "own").write_text(json.dumps(content | {"tokenizer": tokenizer}))
    with pytest.raises(DataError, match=words):
        read_card(tmp_path / "own")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(40))))
    return prepared(tmp_path / "a.jsonl", tmp_path / "data" / "own").prefix


def check(prefix: Path, cache: Path) -> None:
    card = read_card(prefix)
    assert card is not None
    check_intact(prefix, card, cache)


def flip(path: Path, position: int) -> None:
    """Change one bit, and restore the time of the last change."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_card_has_the_hash_of_each_file(prefix: Path) -> None:
    card = read_card(prefix)
    assert card is not None
    assert card.hashes == tuple(
        xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in pair_paths(prefix)
    )


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_change_of_one_bit_at_the_same_size_and_time_is_refused(
    prefix: Path, tmp_path: Path, suffix: str
) -> None:
    check(prefix, tmp_path / "cache")
    flip(Path(f"{prefix}{suffix}"), 50)
    words = (
        rf"own\{suffix} has changed since it was prepared: its hash is \w+, where .*own\.json says \w+; copy the "
        r"dataset again, or prepare it again with force=true"
    )
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            check(prefix, tmp_path / "cache")
    flip(Path(f"{prefix}{suffix}"), 50)
    check(prefix, tmp_path / "cache")


def test_a_file_is_hashed_once_until_it_changes(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.suffix)
        return hash_of(path)

    monkeypatch.setattr("quantexp.data.prepared.hash_of", counted)
    for _ in range(3):
        check(prefix, tmp_path / "cache")
    assert hashed == [".bin", ".idx"]
    os.utime(f"{prefix}.idx")
    check(prefix, tmp_path / "cache")
    assert hashed == [".bin", ".idx", ".idx"]


def test_a_damaged_or_unwritable_cache_refuses_nothing(prefix: Path, tmp_path: Path) -> None:
    check(prefix, tmp_path / "cache")
    for record in (tmp_path / "cache" / "hashes").iterdir():
        record.write_bytes(b"\xff" * 32)
    check(prefix, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    check(prefix, tmp_path / "file" / "cache")


def test_a_file_that_cannot_be_read_is_named(prefix: Path, tmp_path: Path) -> None:
    card = read_card(prefix)
    assert card is not None
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(DataError, match=r"own\.idx: cannot be read: No such file"):
        check_intact(prefix, card, tmp_path / "cache")

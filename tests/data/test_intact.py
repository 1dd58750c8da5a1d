from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from quantexp.data import intact
from quantexp.data.binary import pair_paths
from quantexp.data.intact import check_intact, hash_of
from quantexp.data.prepared import read_card
from quantexp.errors import DataError

from .prepare.made import lines, prepared, rows, texts


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

    monkeypatch.setattr(intact, "hash_of", counted)
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

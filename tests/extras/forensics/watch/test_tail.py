"""Each byte of a growing file is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantexp.errors import UnreadableError
from quantexp.extras.forensics.watch.tail import Tail


def add(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


def all_of(tail: Tail, most: int) -> list[bytes]:
    pieces = [tail.read(most)]
    while not pieces[-1].is_last:
        pieces.append(tail.read(most))
    return [piece.text for piece in pieces]


def test_only_what_was_added_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    add(file, "one\ntwo\n")
    tail = Tail(file)
    first = tail.read()
    assert (first.text, first.start, first.is_anew) == (b"one\ntwo\n", 0, False)
    assert tail.read().text == b""
    add(file, "three\n")
    second = tail.read()
    assert (second.text, second.start, second.is_anew) == (b"three\n", 8, False)


def test_a_line_that_is_being_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    add(file, "one\ntw")
    tail = Tail(file)
    assert tail.read().text == b"one\n"
    assert tail.read().text == b""
    add(file, "o\n")
    assert tail.read().text == b"two\n"


@pytest.mark.parametrize("most", [3, 8, 64, 1000])
def test_pieces_of_any_size_are_the_file(tmp_path: Path, most: int) -> None:
    file = tmp_path / "a.jsonl"
    lines = [f"{i:0{1 + i % 40}}\n".encode() for i in range(200)]
    file.write_bytes(b"".join(lines))
    tail = Tail(file)
    pieces = []
    while tail.offset < file.stat().st_size:
        pieces.append(tail.read(most).text)
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert tail.share == 1.0


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"0123456\n" * 100)
    pieces = all_of(Tail(file), 80)
    assert len(pieces) > 10
    assert b"".join(pieces) == file.read_bytes()


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    file, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    add(file, "one\n")
    tail = Tail(file)
    tail.read()
    add(other, "one\ntwo\n")
    other.replace(file)
    piece = tail.read()
    assert (piece.text, piece.start, piece.is_anew) == (b"one\ntwo\n", 0, True)


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    add(file, "one\ntwo\n")
    tail = Tail(file)
    tail.read()
    os.truncate(file, 4)
    piece = tail.read()
    assert (piece.text, piece.is_anew) == (b"one\n", True)


def test_a_file_that_was_cut_and_has_grown_again_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    add(file, "one\ntwo\n")
    tail = Tail(file)
    tail.read()
    os.truncate(file, 4)
    add(file, "other\nmore\n")
    piece = tail.read()
    assert (piece.text, piece.is_anew) == (b"one\nother\nmore\n", True)


def test_a_file_that_is_gone_and_comes_back_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    tail = Tail(file)
    assert tail.read().is_anew is False
    add(file, "one\n")
    assert tail.read().text == b"one\n"
    file.unlink()
    gone = tail.read()
    assert (gone.text, gone.is_anew) == (b"", True)
    add(file, "two\n")
    assert tail.read().text == b"two\n"


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantexp.extras.forensics.watch.tail.MOST_LINE", 1000)
    file = tmp_path / "a.jsonl"
    add(file, "x" * 10_000)
    words = f"{file}: the line at byte 0 has more than 1.0 kB"
    with pytest.raises(UnreadableError, match=f"^{words}$"):
        Tail(file).read(100)


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UnreadableError, match="must be a file, and is a FIFO"):
        Tail(tmp_path / "a.jsonl").read()

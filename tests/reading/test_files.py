"""Untrusted files are opened without waiting, and read up to a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantexp.errors import UnreadableError
from quantexp.reading.files import open_file, read_bytes, read_text


def refusal(file: Path, most: int = 100) -> str:
    with pytest.raises(UnreadableError) as caught:
        read_text(file, most)
    return str(caught.value).removeprefix(str(file))


def test_a_regular_file_is_read_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("häuser")
    (tmp_path / "b").symlink_to("a")
    assert read_text(tmp_path / "b") == "häuser"
    assert read_bytes(tmp_path / "a", 7) == "häuser".encode()


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "b").symlink_to("nowhere")
    for name in ("a", "b"):
        with pytest.raises(FileNotFoundError):
            open_file(tmp_path / name)


def test_a_file_that_is_not_regular_is_refused_by_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path / "fifo") == " must be a file, and is a FIFO"
    assert refusal(tmp_path) == " must be a file, and is a folder"
    assert refusal(Path("/dev/zero")) == " must be a file, and is a device"
    assert refusal(tmp_path / "loop") == " cannot be read: Too many levels of symbolic links"
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "file" / "a")


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(UnreadableError, match=r"cannot be read: .*embedded null"):
        open_file(Path("a\0b"))


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(1 << 40)
    assert refusal(tmp_path / "sparse") == " must have at most 100 B, and has 1.1 TB"


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = Path("/proc/self/status")  # its size is 0 before it is read
    assert refusal(file).startswith(" must have at most 100 B, and has 101 B")


def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\ntwo\xff\n")
    assert refusal(tmp_path / "a") == ", line 2: it is not UTF-8"

"""Files written many in a call: all of each, under its name, or nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

from quantexp.capture.store import batch_writer
from quantexp.capture.store.batch_writer import Whole, takes, write_files
from quantexp.capture.store.direct import PAGE, aligned, goes_past
from quantexp.capture.store.files import PtFiles
from quantexp.processes.compiled import Compiled

LargestFile = Callable[[int], AbstractContextManager[None]]


def content(num_bytes: int, first: int) -> memoryview:
    memory = aligned(num_bytes)
    memory[:] = (np.arange(num_bytes) + first) % 251
    return memoryview(memory)  # type: ignore[arg-type]


def whole(folder: Path, name: str, *parts: memoryview, past_cache: bool = False) -> Whole:
    return Whole(folder / name, parts, past_cache)


def test_each_has_its_name_and_all_its_parts(tmp_path: Path) -> None:
    (tmp_path / "umlaut ä").mkdir()
    parts = [content(n, n) for n in (1, 70_000, 3)]
    files = [
        whole(tmp_path, "0.pt", *parts),
        whole(tmp_path, "umlaut ä/1.pt", parts[2]),
        whole(tmp_path, "2.pt"),
    ]
    assert write_files(files) == 3, "these tests need a C compiler"
    assert (tmp_path / "0.pt").read_bytes() == b"".join(parts)
    assert (tmp_path / "umlaut ä/1.pt").read_bytes() == bytes(parts[2])
    assert (tmp_path / "2.pt").read_bytes() == b""
    assert not list(tmp_path.rglob("*.part"))


def test_whole_pages_go_past_the_cache_where_the_disk_takes_it(tmp_path: Path) -> None:
    parts = content(16 * PAGE, 1), content(PAGE, 2)
    past_cache = goes_past(parts, tmp_path)
    assert write_files([whole(tmp_path, "0.pt", *parts, past_cache=past_cache)]) == 1
    assert (tmp_path / "0.pt").read_bytes() == b"".join(parts)


def test_what_goes_past_the_cache_is_whole_pages_and_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.capture.store.direct._file_system", lambda folder: "ext4")
    large, page = content(16 * PAGE, 1), content(PAGE, 2)
    assert goes_past([large, page], tmp_path)
    assert not goes_past([page], tmp_path), "not worth the wait"
    assert not goes_past([large, page[:-1]], tmp_path), "no page"
    assert not goes_past([large[1:], page[:1]], tmp_path), "begins within a page"
    monkeypatch.setattr("quantexp.capture.store.direct._file_system", lambda folder: "nfs4")
    assert not goes_past([large, page], tmp_path)


def test_the_first_that_cannot_be_written_ends_it_and_leaves_nothing(
    tmp_path: Path, largest_file: LargestFile
) -> None:
    sizes = (1000, 100_000, 1000)
    files = [whole(tmp_path, f"{i}.pt", content(n, i)) for i, n in enumerate(sizes)]
    with largest_file(50_000):
        assert write_files(files) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


def test_a_folder_that_is_missing_ends_it(tmp_path: Path) -> None:
    files = [whole(tmp_path / name, "0.pt", content(10, 1)) for name in (".", "missing")]
    assert write_files(files) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


def test_a_name_that_is_taken_by_a_folder_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "0.pt").mkdir()
    assert write_files([whole(tmp_path, "0.pt", content(10, 1))]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


def test_without_a_compiler_each_is_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_writer, "compiled", lambda source: Compiled(None, "no C compiler"))
    batch_writer._function.cache_clear()
    try:
        assert not takes(whole(tmp_path, "0.pt", content(10, 1)))
        files = PtFiles(tmp_path)
        prepared = [files.prepared(f"{i}.pt", torch.full((i,), 1.0), {}) for i in range(3)]
        files.write(prepared, is_behind=False)
    finally:
        batch_writer._function.cache_clear()
    assert [len(torch.load(tmp_path / f"{i}.pt")["tensor"]) for i in range(3)] == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_what_is_too_much_for_a_call_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_writer, "CALL_BYTES", 100)
    one = content(1, 0)
    assert takes(whole(tmp_path, "0.pt", content(100, 0)))
    assert not takes(whole(tmp_path, "0.pt", content(101, 0)))
    monkeypatch.setattr(batch_writer, "CALL_PARTS", 2)
    assert takes(whole(tmp_path, "0.pt", one, one))
    assert not takes(whole(tmp_path, "0.pt", one, one, one))

"""A `.pt` file that torch did not write: torch and zip programs read it as if it had."""

from __future__ import annotations

import errno
import io
import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.capture.store.archive import MOST_BYTES, archive, takes
from quantexp.capture.store.direct import PAGE
from quantexp.capture.store.files import PtFiles

METADATA: dict[str, Any] = {
    "module": "L0-fc1",
    "shape": [3, 4],
    "loss_scale": None,
    "formats": {"fprop.input": {"format": "mxfp8", "stochastic": True, "seed": 2**63 - 1}},
    "statistics": {"mean": -0.5, "min": float("inf"), "größe": "µ"},
}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def bytes_of(x: Tensor) -> bytes:
    raw: bytes = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def none(files: object) -> int:
    """Writes no file of many in one call."""
    return 0


def stored(folder: Path, x: Tensor) -> Path:
    files = PtFiles(folder)
    prepared = files.prepared("bf16/x.pt", x, METADATA)
    assert prepared.place is None
    files.write([prepared], is_behind=False)
    assert prepared.place == {"file": "bf16/x.pt"}
    return folder / "bf16/x.pt"


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (), (1,), (64, 1, 1024), (100, 3, 7), (1 << 17, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_what_was_stored(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], mapped: bool
) -> None:
    x = (torch.randn(shape) * 50).to(dtype)
    assert takes(x)
    path = stored(tmp_path, x)
    found = torch.load(path, weights_only=True, mmap=mapped)
    assert found.keys() == {"tensor", "metadata"}
    assert found["metadata"] == METADATA
    assert (found["tensor"].dtype, found["tensor"].shape) == (dtype, x.shape)
    assert found["tensor"].is_contiguous()
    assert bytes_of(found["tensor"]) == bytes_of(x)


def test_zip_programs_read_it_and_values_begin_at_a_page(tmp_path: Path) -> None:
    x = torch.randn(300, 100)
    path = stored(tmp_path, x)
    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None, "every CRC-32"
        assert found.read("archive/data/0") == bytes_of(x)
        assert found.read("archive/version") == b"3\n"
        assert {member.compress_type for member in found.infolist()} == {zipfile.ZIP_STORED}
    assert path.read_bytes().index(bytes_of(x)) % PAGE == 0
    assert path.stat().st_size % PAGE == 0


@pytest.mark.parametrize("more", [0, 1, PAGE // 2, PAGE - 600, PAGE - 400, PAGE - 200])
def test_pages_are_filled_whatever_is_left_of_the_last(more: int) -> None:
    """The directory's padding takes four bytes at least: some of these leave it fewer."""
    for num_bytes in range(16 * PAGE + more, 16 * PAGE + more + 200):
        x = torch.zeros(num_bytes, dtype=torch.uint8)
        parts = archive(x, zlib.crc32(bytes(num_bytes)), {})
        assert len(parts[0]) % PAGE == len(parts[1]) % PAGE == sum(map(len, parts)) % PAGE == 0
        with zipfile.ZipFile(io.BytesIO(b"".join(parts))) as found:
            assert found.read("archive/data/0") == bytes(num_bytes)


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    x = torch.randn(5, 5)
    first, second = stored(tmp_path / "a", x), stored(tmp_path / "b", x.clone())
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "x",
    [torch.randn(8).to(torch.float8_e4m3fn), torch.zeros(0, 3), torch.ones(3).to(torch.complex64)],
    ids=["float8", "empty", "complex"],
)
def test_what_is_not_made_here_is_stored_by_torch(tmp_path: Path, x: Tensor) -> None:
    assert not takes(x)
    found = torch.load(stored(tmp_path, x), weights_only=True)["tensor"]
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert bytes_of(found) == bytes_of(x)


def test_a_tensor_beyond_32_bit_sizes_is_left_to_torch() -> None:
    assert takes(torch.empty(MOST_BYTES, dtype=torch.uint8, device="meta"))
    assert not takes(torch.empty(MOST_BYTES + 1, dtype=torch.uint8, device="meta"))


def test_of_files_written_together_those_before_a_full_disk_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.pwritev, list[int]()

    def full_after_two(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(descriptor)
        return real(descriptor, parts, offset)

    files = PtFiles(tmp_path)
    together = [files.prepared(f"{i}.pt", torch.full((3,), float(i)), METADATA) for i in range(4)]
    monkeypatch.setattr("quantexp.capture.store.files.write_files", none)
    monkeypatch.setattr(os, "pwritev", full_after_two)
    with pytest.raises(OSError, match="No space left"):
        files.write(together, is_behind=False)
    assert [one.place is not None for one in together] == [True, True, False, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt"]
    for i in range(2):
        found = torch.load(tmp_path / f"{i}.pt", weights_only=True)["tensor"]
        assert found.tolist() == [i] * 3


def test_of_files_written_in_one_call_those_before_one_that_cannot_be_stay(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    files, sizes = PtFiles(tmp_path), (100, 100, 100_000, 100)
    together = [
        files.prepared(f"bf16/{i}.pt", torch.full((n,), float(i)), METADATA)
        for i, n in enumerate(sizes)
    ]
    with largest_file(100_000), pytest.raises(OSError, match="File too large"):
        files.write(together, is_behind=False)
    assert [one.place is not None for one in together] == [True, True, False, False]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["0.pt", "1.pt"]


def test_written_together_or_alone_a_file_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [torch.arange(100.0), torch.zeros(0), torch.arange(100_001.0)]
    written = []
    for folder in (tmp_path / "together", tmp_path / "alone"):
        files = PtFiles(folder)
        all_prepared = [files.prepared(f"{i}.pt", x, METADATA) for i, x in enumerate(values)]
        files.write(all_prepared, is_behind=False)
        written.append([(folder / f"{i}.pt").read_bytes() for i in range(len(values))])
        monkeypatch.setattr("quantexp.capture.store.files.write_files", none)
    assert written[0] == written[1]


@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_write_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_torchs: bool
) -> None:
    def failing(*_: object) -> int:
        raise OSError(28, "No space left on device")

    x = torch.zeros(0) if is_torchs else torch.zeros(10)
    monkeypatch.setattr("quantexp.capture.store.files.write_files", none)
    monkeypatch.setattr("torch.save", failing)
    monkeypatch.setattr("os.pwritev", failing)
    files = PtFiles(tmp_path)
    prepared = files.prepared("bf16/x.pt", x, METADATA)
    with pytest.raises(OSError, match="No space left"):
        files.write([prepared], is_behind=False)
    assert prepared.place is None
    assert not list((tmp_path / "bf16").iterdir())

"""Files of captured tensors: whole and readable by torch and zip programs, or not there."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.capture.store.files import PtFiles, Stored, Values

METADATA: dict[str, Any] = {
    "module": "L0-fc1",
    "shape": [3, 4],
    "loss_scale": None,
    "formats": {"fprop.input": {"format": "mxfp8", "stochastic": True, "seed": 2**63 - 1}},
    "statistics": {"mean": -0.5, "min": float("inf"), "größe": "µ"},
}


def bytes_of(x: Tensor) -> bytes:
    raw: bytes = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def values(name: str, x: Tensor) -> Values:
    return Values(name, x, METADATA, Stored(x.nbytes))


def stored(folder: Path, x: Tensor) -> Path:
    one = values("bf16/x.pt", x)
    PtFiles(folder).write([one])
    assert one.stored.place == {"file": "bf16/x.pt"}
    return folder / "bf16/x.pt"


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 3), (100, 3, 7)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_values_and_metadata_come_back_without_running_code(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], mapped: bool
) -> None:
    x = (torch.randn(shape) * 50).to(dtype)
    content = torch.load(stored(tmp_path, x), weights_only=True, mmap=mapped)
    assert content.keys() == {"tensor", "metadata"}
    assert content["metadata"] == METADATA
    assert (content["tensor"].dtype, content["tensor"].shape) == (dtype, x.shape)
    assert bytes_of(content["tensor"]) == bytes_of(x)


def test_zip_programs_read_it(tmp_path: Path) -> None:
    x = torch.randn(300, 100)
    with zipfile.ZipFile(stored(tmp_path, x)) as archive:
        assert archive.testzip() is None, "every CRC-32"
        (data,) = (name for name in archive.namelist() if name.endswith("/data/0"))
        assert archive.read(data) == bytes_of(x)


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    x = torch.randn(5, 5)
    first, second = stored(tmp_path / "a", x), stored(tmp_path / "b", x.clone())
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_full_disk_leaves_earlier_files_and_no_partial_one(tmp_path: Path, size: int) -> None:
    batch = [values(f"{i}.pt", torch.full((size,), float(i))) for i in range(4)]
    (tmp_path / "2.pt.part").symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        PtFiles(tmp_path).write(batch)
    assert [bool(one.stored.place) for one in batch] == [True, True, False, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt"]
    for i in range(2):
        content = torch.load(tmp_path / f"{i}.pt", weights_only=True)
        assert content["tensor"].unique().tolist() == [i]


def test_a_file_that_may_not_be_so_large_leaves_nothing(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    with largest_file(100_000), pytest.raises((OSError, RuntimeError)):
        PtFiles(tmp_path).write([values("x.pt", torch.ones(100_000))])
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.pt").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        PtFiles(tmp_path).write([values("x.pt", torch.ones(3))])
    assert raised.value.errno == errno.EISDIR
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]

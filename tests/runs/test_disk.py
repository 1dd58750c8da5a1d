"""The message for a file that cannot be written."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from quantexp.runs import disk
from quantexp.runs.disk import explanation, writing


def words_of(file: Path, number: int, num_bytes: int = 0) -> str:
    with (
        pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught,
        writing(file, num_bytes),
    ):
        raise OSError(number, os.strerror(number))
    words = explanation(caught.value)
    assert words is not None
    return words


def test_full_disk_is_reported_with_the_missing_bytes_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_free_bytes", lambda file: 1_500_000)
    file = tmp_path / "metrics.jsonl"
    assert words_of(file, errno.ENOSPC, 2_000_000_000) == (
        f"{file} cannot be written (No space left on device: 2.0 GB are to be written, and 1.5 MB are free); free some "
        f"space on the disk of {tmp_path}, or set paths.root to another disk"
    )
    assert "(Disk quota exceeded: 1.5 MB are free); your quota on the disk of" in (
        words_of(file, errno.EDQUOT)
    )


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "is mounted read-only: mount it for writing, or set paths.root"),
        (errno.EACCES, "give this user the permission to write in"),
        (errno.EPERM, "give this user the permission to write in"),
        (errno.EFBIG, "the file would be larger than files may be: see ulimit -f"),
        (errno.EIO, "or its server, fails: see the system's log"),
        (errno.ESTALE, "no longer knows the file"),
    ],
)
def test_each_error_has_its_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    words = words_of(tmp_path / "status.json", number)
    assert words.startswith(
        f"{tmp_path / 'status.json'} cannot be written ({os.strerror(number)}); "
    )
    assert remedy in words


def test_message_for_a_vanished_folder_has_no_free_space(tmp_path: Path) -> None:
    assert "free" in words_of(tmp_path / "gone" / "too" / "file", errno.ENOSPC, 5)


def test_error_of_another_kind_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"), writing(tmp_path / "f"):
        raise RuntimeError("shape")
    assert explanation(OSError(errno.ECONNRESET, "reset")) is None
    assert explanation(OSError(errno.ENOENT, "none", "file")) is None


def test_torch_s_error_about_a_position_is_the_system_s(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    file = tmp_path / "tensor.pt"
    with (
        pytest.raises(OSError, match="File too large") as caught,
        largest_file(100_000),
        writing(file, 400_000),
        file.open("wb") as stream,
    ):
        torch.save(torch.zeros(100_000), stream)
    assert str(explanation(caught.value)).startswith(f"{file} cannot be written (File too large); ")

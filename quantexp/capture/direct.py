"""Files written past the system's page cache, where that can be had.

What goes through the cache is copied once more, by a processor that training needs, and pushes out what others read.
Past it (O_DIRECT, see open(2)) go whole pages that lie on page boundaries in memory and in the file, on disks of this
machine: over a network each piece would wait for the server. All else goes through the cache, and so does what comes
while the writer is behind: the cache takes a burst that the disk cannot.
"""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

#: Bytes of a page: what places and lengths are multiples of, on every disk that is asked.
PAGE = 4096
#: Less is not worth the wait for the disk.
_LEAST_BYTES = 1 << 16
#: One call of Linux takes less than 2 GiB.
_CALL_BYTES = 1 << 30
#: File systems of disks of this machine that are known to take it.
_TAKE_IT = frozenset({"ext4", "xfs"})
#: What a file system says that does not take it after all, or wants larger pages.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A file that is written at given places."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        """Open or create it; `flags` are those of `os.open`.

        Raises:
            OSError: it cannot be opened.
        """
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
        self._direct = _opened_direct(path)

    def write_at(self, content: bytes | memoryview, offset: int, is_behind: bool = False) -> None:
        """Write bytes from a place on; `is_behind` prefers the cache.

        Raises:
            OSError: it cannot be written, or not all of it.
        """
        rest = memoryview(content)
        while rest:
            pages = 0 if is_behind else self._whole_pages(rest, offset)
            written = self._write_direct(rest[:pages], offset) if pages else 0
            written = written or os.pwrite(self._cached, rest[:_CALL_BYTES], offset)
            rest, offset = rest[written:], offset + written

    def truncate(self, num_bytes: int) -> None:
        """Cut off what lies behind.

        Raises:
            OSError: it cannot be cut.
        """
        os.ftruncate(self._cached, num_bytes)

    def close(self) -> None:
        """Nothing more is written."""
        os.close(self._cached)
        self._close_direct()

    def _whole_pages(self, content: memoryview, offset: int) -> int:
        """How many bytes may go past the cache, from the first on."""
        if self._direct is None or len(content) < _LEAST_BYTES or offset % PAGE:
            return 0
        address = np.frombuffer(content, np.uint8).ctypes.data
        return 0 if address % PAGE else min(len(content), _CALL_BYTES) // PAGE * PAGE

    def _write_direct(self, content: memoryview, offset: int) -> int:
        """How many bytes were written; none where the file system does not take it, and is not asked again."""
        assert self._direct is not None
        try:
            return os.pwrite(self._direct, content, offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._close_direct()
            return 0

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _opened_direct(path: Path) -> int | None:
    """The file once more, past the cache; None where that cannot be had."""
    flag = getattr(os, "O_DIRECT", None)  # Linux has it
    if flag is None or _file_system(path.parent) not in _TAKE_IT:
        return None
    try:
        return os.open(path, os.O_WRONLY | flag)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return None


@lru_cache(maxsize=64)
def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty where the system does not say."""
    import psutil

    place, mounts = folder.resolve(), psutil.disk_partitions(all=True)
    around = [mount for mount in mounts if place.is_relative_to(mount.mountpoint)]
    # Of two mounts on one place the later one is seen.
    found = max(enumerate(around), key=lambda one: (len(one[1].mountpoint), one[0]), default=None)
    return "" if found is None else found[1].fstype

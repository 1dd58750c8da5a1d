"""Files written past the system's page cache, where that can be had.

What goes through the cache is copied once more, by a processor that training needs, and pushes out what others read.
Past it (O_DIRECT, see open(2)) go whole pages that lie on page boundaries in memory and in the file, on disks of this
machine: over a network each piece would wait for the server. All else goes through the cache, and so does what comes
while the writer is behind: the cache takes a burst that the disk cannot.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Bytes of a page: what places and lengths are multiples of, on every disk that is asked.
PAGE = 4096
#: Less is not worth the wait for the disk.
LEAST_BYTES = 1 << 16
#: One call of Linux takes less than 2 GiB, in at most so many parts.
CALL_BYTES, CALL_PARTS = 1 << 30, 1024
#: File systems of disks of this machine that are known to take it.
_TAKE_IT = frozenset({"ext4", "xfs"})
#: What a file system says that does not take it after all, or wants larger pages.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Fresh memory that begins with a page."""
    memory = np.empty(num_bytes + PAGE, np.uint8)
    return memory[-address_of(memory) % PAGE :][:num_bytes]


def goes_past(parts: Iterable[memoryview], folder: Path) -> bool:
    """Whether all of a file of these parts may go past the cache."""
    num_bytes = 0
    for part in parts:
        if len(part) % PAGE or address_of(np.frombuffer(part, np.uint8)) % PAGE:
            return False
        num_bytes += len(part)
    return num_bytes >= LEAST_BYTES and _may_go_past(folder)


class DirectFile:
    """A file that is written at given places."""

    def __init__(self, path: Path, flags: int = 0, past_cache: bool = True) -> None:
        """Open or create it; `flags` are those of `os.open`. Without `past_cache` all goes through the cache.

        Raises:
            OSError: it cannot be opened.
        """
        self._path = path
        self._cached: int | None = None
        self._direct: int | None = None
        if past_cache and _may_go_past(path.parent):
            try:
                self._direct = _opened(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                flags &= ~os.O_EXCL  # it is refused after it was created
        if self._direct is None:
            self._cached = _opened(path, flags)

    def write_at(
        self, parts: Iterable[bytes | memoryview], offset: int, is_behind: bool = False
    ) -> None:
        """Write bytes, one part after the other, from a place on; `is_behind` prefers the cache.

        Raises:
            OSError: it cannot be written, or not all of it.
        """
        rest = deque(memoryview(part) for part in parts if len(part))
        while rest:
            pages = [] if is_behind else self._whole_pages(rest, offset)
            written = self._write_direct(pages, offset) if pages else 0
            written = written or self._write_cached(rest[0], offset)
            offset += written
            while written:
                first = rest.popleft()
                if written < len(first):
                    rest.appendleft(first[written:])
                written -= min(written, len(first))

    def truncate(self, num_bytes: int) -> None:
        """Cut off what lies behind.

        Raises:
            OSError: it cannot be cut.
        """
        os.truncate(self._path, num_bytes)

    def close(self) -> None:
        """Nothing more is written."""
        if self._cached is not None:
            os.close(self._cached)
            self._cached = None
        self._close_direct()

    def _whole_pages(self, parts: Iterable[memoryview], offset: int) -> list[memoryview]:
        """What may go past the cache in one call, from the first byte on."""
        found: list[memoryview] = []
        num_bytes = 0
        if self._direct is None or offset % PAGE:
            return found
        for part in islice(parts, CALL_PARTS):
            if address_of(np.frombuffer(part, np.uint8)) % PAGE:
                break
            whole = min(len(part), CALL_BYTES - num_bytes) // PAGE * PAGE
            if whole:
                found.append(part[:whole])
                num_bytes += whole
            if whole < len(part):
                break
        return found if num_bytes >= LEAST_BYTES else []

    def _write_cached(self, part: memoryview, offset: int) -> int:
        if self._cached is None:
            self._cached = _opened(self._path, 0)
        return os.pwritev(self._cached, [part[:CALL_BYTES]], offset)

    def _write_direct(self, parts: list[memoryview], offset: int) -> int:
        """How many bytes were written; none where the file system does not take it, and is not asked again."""
        assert self._direct is not None
        try:
            return os.pwritev(self._direct, parts, offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._close_direct()
            return 0

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _opened(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)


def address_of(memory: NDArray[Any]) -> int:
    """Where its first element lies."""
    return int(memory.__array_interface__["data"][0])


def _may_go_past(folder: Path) -> bool:
    """Whether the disk is known to take it; of the systems Linux alone has it."""
    return hasattr(os, "O_DIRECT") and _file_system(folder) in _TAKE_IT


@lru_cache(maxsize=64)
def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty where the system does not say."""
    import psutil

    place, mounts = folder.resolve(), psutil.disk_partitions(all=True)
    around = [mount for mount in mounts if place.is_relative_to(mount.mountpoint)]
    # Of two mounts on one place the later one is seen.
    found = max(enumerate(around), key=lambda one: (len(one[1].mountpoint), one[0]), default=None)
    return "" if found is None else found[1].fstype

"""Writes files with direct I/O, bypassing the page cache, if the disk supports it.

A write through the page cache costs another copy, on a core that training needs, and evicts other data. Direct I/O
(O_DIRECT, see open(2)) takes whole pages that are page-aligned in memory and in the file, on local disks: over a
network each piece would wait for the server. All other data goes through the cache, and so does data that arrives while
the writer is behind, because the cache absorbs bursts.
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

#: Bytes of a page; offsets and lengths are multiples of it on every supported disk.
PAGE = 4096
#: Smaller writes are not worth waiting for the disk.
LEAST_BYTES = 1 << 16
#: Limits of one system call on Linux: less than 2 GiB, and this many parts.
CALL_BYTES, CALL_PARTS = 1 << 30, 1024
#: Local file systems that are known to support direct I/O.
_TAKE_IT = frozenset({"ext4", "xfs"})
#: Errors of a file system that does not support it after all, or needs larger pages.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """New page-aligned memory."""
    memory = np.empty(num_bytes + PAGE, np.uint8)
    return memory[-address_of(memory) % PAGE :][:num_bytes]


def goes_past(parts: Iterable[memoryview], folder: Path) -> bool:
    """Whether a file of these parts may bypass the cache completely."""
    num_bytes = 0
    for part in parts:
        if len(part) % PAGE or address_of(np.frombuffer(part, np.uint8)) % PAGE:
            return False
        num_bytes += len(part)
    return num_bytes >= LEAST_BYTES and _may_go_past(folder)


class DirectFile:
    """A file that is written at given offsets."""

    def __init__(self, path: Path, flags: int = 0, past_cache: bool = True) -> None:
        """Open or create the file; `flags` are those of `os.open`. Without `past_cache` all writes use the cache.

        Raises:
            OSError: the file cannot be opened.
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
                flags &= ~os.O_EXCL  # O_DIRECT is refused only after the file is created
        if self._direct is None:
            self._cached = _opened(path, flags)

    def write_at(
        self, parts: Iterable[bytes | memoryview], offset: int, is_behind: bool = False
    ) -> None:
        """Write parts one after the other from an offset; `is_behind` prefers the cache.

        Raises:
            OSError: the parts cannot be written completely.
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
        """Truncate the file.

        Raises:
            OSError: the file cannot be truncated.
        """
        os.truncate(self._path, num_bytes)

    def close(self) -> None:
        """Close the file."""
        if self._cached is not None:
            os.close(self._cached)
            self._cached = None
        self._close_direct()

    def _whole_pages(self, parts: Iterable[memoryview], offset: int) -> list[memoryview]:
        """The leading pages that may bypass the cache in one call."""
        pages: list[memoryview] = []
        num_bytes = 0
        if self._direct is None or offset % PAGE:
            return pages
        for part in islice(parts, CALL_PARTS):
            if address_of(np.frombuffer(part, np.uint8)) % PAGE:
                break
            num_whole = min(len(part), CALL_BYTES - num_bytes) // PAGE * PAGE
            if num_whole:
                pages.append(part[:num_whole])
                num_bytes += num_whole
            if num_whole < len(part):
                break
        return pages if num_bytes >= LEAST_BYTES else []

    def _write_cached(self, part: memoryview, offset: int) -> int:
        if self._cached is None:
            self._cached = _opened(self._path, 0)
        return os.pwritev(self._cached, [part[:CALL_BYTES]], offset)

    def _write_direct(self, parts: list[memoryview], offset: int) -> int:
        """Write with direct I/O and return the bytes written; 0 if the file system turns out not to support it."""
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
    """The address of the first element."""
    return int(memory.__array_interface__["data"][0])


def _may_go_past(folder: Path) -> bool:
    """Whether the disk is known to support direct I/O, which only Linux has."""
    return hasattr(os, "O_DIRECT") and _file_system(folder) in _TAKE_IT


@lru_cache(maxsize=64)
def _file_system(folder: Path) -> str:
    """The type of a folder's file system; empty if unknown."""
    import psutil

    place, mounts = folder.resolve(), psutil.disk_partitions(all=True)
    around = [mount for mount in mounts if place.is_relative_to(mount.mountpoint)]
    # Of two mounts at the same place, the later one is visible.
    mount = max(enumerate(around), key=lambda m: (len(m[1].mountpoint), m[0]), default=None)
    return "" if mount is None else mount[1].fstype

"""Reads a file again only if it has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from quantexp.errors import UnreadableError

_Content = TypeVar("_Content")
Signature = tuple[int, int, int] | None


def signature(file: Path) -> Signature:
    """What changes with a file's content: inode, size and time; None if it cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class Kept(Generic[_Content]):
    """The content of some files, each as it was read when it last changed."""

    def __init__(self, read: Callable[[Path], _Content]) -> None:
        self._read = read
        self._kept: dict[Path, tuple[Signature, _Content | None]] = {}

    def __call__(self, file: Path) -> _Content | None:
        """The content; None if `read` finds that the file cannot be read."""
        now = signature(file)
        kept = self._kept.get(file)
        if kept is None or now is None or kept[0] != now:
            kept = self._kept[file] = now, self._readable(file)
        return kept[1]

    def _readable(self, file: Path) -> _Content | None:
        try:
            return self._read(file)
        except UnreadableError:
            return None

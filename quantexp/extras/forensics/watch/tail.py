"""Reads files that change: a growing one in pieces of whole lines, each byte once; any other again only after a change.

A line without its newline is left for the next time. A file that was replaced, cut or rewritten is read anew: its inode
differs, or it is shorter than what was read, or the last bytes that were read are others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from quantexp.errors import UnreadableError
from quantexp.reading.files import open_file, unreadable
from quantexp.reading.json_files import MOST_LINE
from quantexp.terminal.units import human_bytes

#: Bytes that are read at once.
PIECE = 1 << 18
#: The last bytes that were read, by which a rewritten file is told from one that grew.
_REMEMBERED = 64


@dataclass(frozen=True)
class Piece:
    """Whole lines of a file, perhaps none."""

    text: bytes
    #: The offset of the first byte.
    start: int = 0
    #: Whether what was read before is no longer in the file.
    is_anew: bool = False
    #: Whether there is no further whole line.
    is_last: bool = True


class Tail:
    """The position up to which a file has been read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        #: The bytes that were read, and those that the file had then.
        self.offset, self.size = 0, 0
        self._inode, self._last = -1, b""

    @property
    def share(self) -> float:
        """The share of the file that has been read."""
        return self.offset / self.size if self.size else 1.0

    def read(self, most: int = PIECE) -> Piece:
        """The next lines, of at most `most` bytes, or one longer line; nothing without the file.

        Raises:
            UnreadableError: the file cannot be read, or has a line of more than `MOST_LINE` bytes.
        """
        try:
            stream = open_file(self.file)
        except FileNotFoundError:
            is_gone, self.offset, self.size, self._last = self.offset > 0, 0, 0, b""
            return Piece(b"", is_anew=is_gone)
        with stream:
            try:
                found = os.fstat(stream.fileno())
                is_anew = self._is_another(stream.fileno(), found)
                if is_anew:
                    self.offset, self._last = 0, b""
                had_read, self._inode, self.size = self.offset, found.st_ino, found.st_size
                text = self._lines(stream.fileno(), most)
            except OSError as error:
                raise unreadable(self.file, error) from error
        self.offset += len(text)
        self._last = (self._last + text)[-_REMEMBERED:]
        return Piece(text, had_read, is_anew, len(text) < most // 2)

    def _is_another(self, descriptor: int, found: os.stat_result) -> bool:
        if not self.offset:
            return False
        if found.st_ino != self._inode or found.st_size < self.offset:
            return True
        start = self.offset - len(self._last)
        return os.pread(descriptor, len(self._last), start) != self._last

    def _lines(self, descriptor: int, most: int) -> bytes:
        """The whole lines of the next `most` bytes; of a longer line, all of it."""
        while True:
            text = os.pread(descriptor, most, self.offset)
            end = text.rfind(b"\n") + 1
            if end or len(text) < most:
                return text[:end]
            if most > MOST_LINE:
                raise UnreadableError(
                    f"{self.file}: the line at byte {self.offset} has more than {human_bytes(MOST_LINE)}"
                )
            most *= 4


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

"""A file's content as a stream of blocks, unpacked if it is gzip, bzip2 or Zstandard.

The first bytes determine the format, not the name. Consecutive packed members (multistream dumps, concatenated gzip)
form one stream. A member that ends early is an error: some of the libraries' own readers treat it as the end of the
file. Memory is bounded, however much a block expands to, and content that expands more than text does is refused.
"""

import bz2
import importlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantexp.errors import DataError

#: Bytes of a file read at a time, and bytes of Zstandard unpacked at a time, each to at most 32 KiB.
_BLOCK, _ZSTD_BLOCK = 1 << 16, 1 << 10
#: Largest unpacked block of gzip and bzip2.
_MAX_UNPACKED = 1 << 20
#: A file of more content than this that expands more than so many times is refused; no text does.
_MAX_CONTENT, _MAX_EXPANSION = 1 << 28, 1000
#: First bytes of a packed file -> name of the format.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    # Frames to skip, with which pzstd begins a file (RFC 8878, 3.1.2).
    **{bytes([first, 0x2A, 0x4D, 0x18]): "zstd" for first in range(0x50, 0x60)},
}


def unpacked(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields blocks of the content, with the number of bytes of the file (as stored) read so far.

    Raises:
        DataError: the file cannot be read, ends early or is damaged, or is Zstandard and its library is missing.
    """
    try:
        yield from _unpacked(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def first_bytes(path: Path, count: int) -> bytes:
    """Returns up to `count` first bytes of the content.

    Raises:
        DataError: as for `unpacked`.
    """
    head = b""
    for block, _ in unpacked(path):
        head += block
        if len(head) >= count:
            break
    return head[:count]


def _unpacked(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        packed = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
        if packed is None:
            while block := file.read(_BLOCK):
                yield block, file.tell()
            return
        new, num_unpacked = _unpacker(packed, path), 0
        member: Any = None
        damaged = _damage(packed)
        while data := file.read(_BLOCK):
            while data:
                member = member or new()
                try:
                    for block in _content(member, packed, data):
                        num_unpacked += len(block)
                        if num_unpacked > max(_MAX_CONTENT, _MAX_EXPANSION * file.tell()):
                            raise DataError(
                                f"{path}: expands to more than {_MAX_EXPANSION:,} times its size, which no text "
                                "does; give another dataset.source"
                            )
                        yield block, file.tell()
                except damaged as error:
                    raise DataError(
                        f"{path}: damaged {packed} data near byte {file.tell():,} of "
                        f"{path.stat().st_size:,} ({error}): download or copy it again"
                    ) from error
                data = member.unused_data.lstrip(b"\0") if member.eof else b""
                if member.eof:
                    member = None
        if member is not None:
            raise DataError(
                f"{path}: cut short: its {packed} data has no end after {path.stat().st_size:,} "
                "bytes; download or copy it again"
            )


def _content(member: Any, packed: str, data: bytes) -> Iterator[bytes]:
    """Yields what a member unpacks from some data, in blocks of bounded size that are not empty."""
    while True:
        block = member.decompress(data, _MAX_UNPACKED)
        if block:
            yield block
        if packed == "gzip":
            data = member.unconsumed_tail
            has_more = bool(data) or len(block) == _MAX_UNPACKED
        else:
            data, has_more = b"", not member.needs_input
        if member.eof or not has_more:
            return


class _ZstdMember:
    """A frame of Zstandard with the interface of `bz2.BZ2Decompressor`; its library has no bound of a block's size."""

    def __init__(self, frame: Any) -> None:
        self._frame, self._rest = frame, b""

    @property
    def eof(self) -> bool:
        """Whether the frame is complete."""
        return bool(self._frame.eof)

    @property
    def needs_input(self) -> bool:
        """Whether nothing is left to unpack."""
        return not self._rest

    @property
    def unused_data(self) -> bytes:
        """What follows the frame."""
        return bytes(self._frame.unused_data) + self._rest

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Unpacks so much that it is at most 32 MiB, whatever `max_length`."""
        self._rest += data
        piece, self._rest = self._rest[:_ZSTD_BLOCK], self._rest[_ZSTD_BLOCK:]
        return bytes(self._frame.decompress(piece))


def _unpacker(packed: str, path: Path) -> Callable[[], Any]:
    if packed == "gzip":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)
    if packed == "bzip2":
        return bz2.BZ2Decompressor
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise DataError(
            f"{path}: Zstandard needs the zstandard library: pip install 'quantexp[data]'"
        ) from error
    return lambda: _ZstdMember(zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj())


def _damage(packed: str) -> tuple[type[Exception], ...]:
    """Returns the exceptions that the unpacker raises for damaged data."""
    if packed == "zstd":
        return (importlib.import_module("zstandard").ZstdError,)
    return (OSError, zlib.error, ValueError, EOFError)

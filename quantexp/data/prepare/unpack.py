"""A file's content as a stream of blocks, unpacked if it is gzip, bzip2 or Zstandard.

The first bytes determine the format, not the name. Consecutive packed members (multistream dumps, concatenated gzip)
form one stream. A member that ends early is an error: some of the libraries' own readers treat it as the end of the
file.
"""

import bz2
import importlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantexp.errors import DataError

#: Bytes of a file unpacked at a time.
_BLOCK = 1 << 16
#: First bytes of a packed file -> name of the format.
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}


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
        new = _unpacker(packed, path)
        member: Any = None
        damaged = _damage(packed)
        while data := file.read(_BLOCK):
            while data:
                member = member or new()
                try:
                    block = member.decompress(data)
                except damaged as error:
                    raise DataError(
                        f"{path}: damaged {packed} data near byte {file.tell():,} of "
                        f"{path.stat().st_size:,} ({error}): download or copy it again"
                    ) from error
                if block:
                    yield block, file.tell()
                data = member.unused_data.lstrip(b"\0") if member.eof else b""
                if member.eof:
                    member = None
        if member is not None:
            raise DataError(
                f"{path}: cut short: its {packed} data has no end after {path.stat().st_size:,} "
                "bytes; download or copy it again"
            )


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
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _damage(packed: str) -> tuple[type[Exception], ...]:
    """Returns the exceptions that the unpacker raises for damaged data."""
    if packed == "zstd":
        return (importlib.import_module("zstandard").ZstdError,)
    return (OSError, zlib.error, ValueError, EOFError)

"""Reads a file of `torch.save` that anyone may have written, and lets no storage be larger than its stored bytes.

torch takes the size of a storage from the file's pickle. Without a memory mapping, older versions of it then read
beyond the bytes of the file; with one, the values of another member follow. Here an archive is always mapped, and each
storage must be a member: all lie at the members' offsets from one page, where the mapping begins, and have their sizes.
Files older than the archives state the size beside the values, and torch compares both.
"""

from __future__ import annotations

import struct
import zipfile
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, BinaryIO


def load_torch_file(path: Path, **options: Any) -> Any:
    """The content of a file, with tensors on the CPU, those of an archive memory-mapped copy-on-write.

    `options` are those of `torch.load`, which says whether the file can run code.

    Raises:
        ValueError: a member is compressed, members are larger than the file, or a storage is not a member.
        Exception: whatever torch, the archive or an unpickler raises on damaged bytes.
    """
    import torch

    members = _members(path) if zipfile.is_zipfile(path) else None
    starts: set[int] | None = None

    def stored(storage: Any, location: str) -> Any:
        nonlocal starts
        if members is not None and (size := storage.nbytes()):
            at = storage.data_ptr()
            possible = {at - offset for offset, of_member in members if of_member == size}
            starts = {start for start in possible if start % PAGESIZE == 0} & (starts or possible)
            if not starts:
                raise ValueError(f"a storage of {size} bytes is no member of the archive")
        return storage

    return torch.load(path, map_location=stored, mmap=members is not None, **options)


def _members(path: Path) -> list[tuple[int, int]]:
    """Offset and size of each member. torch compresses none: a small file could fill the memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("a member is compressed")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("its members are larger than the file")
    with path.open("rb") as stream:
        return [(_offset(stream, member), member.file_size) for member in members]


def _offset(stream: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: after its local header of 30 bytes, its name and its padding."""
    stream.seek(member.header_offset + 26)
    name, padding = struct.unpack("<HH", stream.read(4))
    return int(member.header_offset + 30 + name + padding)

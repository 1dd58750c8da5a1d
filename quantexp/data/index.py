"""Writes Megatron's `.idx` from a file of lengths, in bounded memory.

It is a separate module because `binary` needs no numpy.

Megatron's own builder keeps every length, offset and end as a Python number, some 100 bytes per document. The layout
(version 1): magic, type of the ids, number of sequences and of ends; then each sequence's length (int32) and offset in
bytes (int64), and the end of each document (int64). Here one document is one sequence.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: The first bytes of an index of version 1.
INDEX_MAGIC = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
#: The magic, the code of the ids' type, the number of sequences and of document ends. Then follow each sequence's
#: length (int32) and offset (int64), and the end of each document (int64).
INDEX_HEAD = struct.Struct("<17sBQQ")
#: Megatron's codes of the types.
_CODES = {"<u2": 8, "<i4": 4}
#: Lengths in memory at a time.
_BLOCK = 1 << 20


def id_type(vocab_size: int) -> np.dtype[Any]:
    """Returns the type of the ids in a `.bin` by Megatron's rule: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def write_index(path: Path, lengths: Sequence[Path], dtype: np.dtype[Any]) -> None:
    """Writes the index of the documents whose lengths (int32) are in these files, in order."""
    total = sum(file.stat().st_size for file in lengths) // 4
    with path.open("wb") as out:
        out.write(
            INDEX_HEAD.pack(INDEX_MAGIC, _CODES[dtype.newbyteorder("<").str], total, total + 1)
        )
        for block in blocks(lengths):
            out.write(block.tobytes())
        offset = 0
        for block in blocks(lengths):
            ends = offset + np.cumsum(block, dtype="<i8") * dtype.itemsize
            out.write(
                np.concatenate([np.array([offset], "<i8"), ends[:-1]]).astype("<i8").tobytes()
            )
            offset = int(ends[-1])
        for start in range(0, total + 1, _BLOCK):
            out.write(np.arange(start, min(start + _BLOCK, total + 1), dtype="<i8").tobytes())


def blocks(lengths: Sequence[Path]) -> Iterator[np.ndarray]:
    """Yields the lengths in blocks."""
    for file in lengths:
        with file.open("rb") as stream:
            while data := stream.read(4 * _BLOCK):
                yield np.frombuffer(data, "<i4")

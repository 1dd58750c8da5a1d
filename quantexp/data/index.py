"""Writes Megatron's `.idx` from a file of lengths, in bounded memory, and checks one.

It is a separate module because `binary` needs no numpy.

Megatron's own builder keeps every length, offset and end as a Python number, some 100 bytes per document. The layout
(version 1): magic, type of the ids, number of sequences and of ends; then each sequence's length (int32) and offset in
bytes (int64), and the end of each document (int64). Here one document is one sequence. The index of a multimodal pair
ends with the mode of each sequence (int8), which a run ignores as Megatron's plain reader does.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantexp.data.tokenizers.protocol import id_bytes
from quantexp.errors import DataError

#: The first bytes of an index of version 1.
INDEX_MAGIC = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
#: The magic, the code of the ids' type, the number of sequences and of document ends. Then follow each sequence's
#: length (int32) and offset (int64), and the end of each document (int64).
INDEX_HEAD = struct.Struct("<17sBQQ")
#: Megatron's codes of the types.
_CODES = {"<u2": 8, "<i4": 4}
#: Bytes of an id by the code of its type: uint8, int8, uint16, int16, int32, int64.
_ID_BYTES = {1: 1, 2: 1, 8: 2, 3: 2, 4: 4, 5: 8}
#: Lengths in memory at a time.
_BLOCK = 1 << 20


def id_type(vocab_size: int) -> np.dtype[Any]:
    """Returns the type of the ids in a `.bin` by Megatron's rule: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if id_bytes(vocab_size) == 2 else "<i4")


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


def check_index(idx_path: Path, bin_path: Path) -> None:
    """Requires an index whose documents follow each other without a gap and fill `.bin`.

    Megatron's reader checks less: it would read another file's ids, or outside of the file, which ends the process.

    Raises:
        DataError: the index is not Megatron's, cut short, or does not match `.bin`.
    """
    with idx_path.open("rb") as stream:
        head = stream.read(INDEX_HEAD.size)
    if len(head) < INDEX_HEAD.size or not head.startswith(INDEX_MAGIC):
        raise DataError(f"{idx_path}: not a Megatron index; set another dataset.path")
    _, code, num_sequences, num_ends = INDEX_HEAD.unpack(head)
    size, expected = idx_path.stat().st_size, INDEX_HEAD.size + 12 * num_sequences + 8 * num_ends
    if size < expected:
        raise DataError(f"{idx_path}: cut short: copy or prepare the dataset again")
    is_whole = size in (expected, expected + num_sequences)  # without or with modes
    if code not in _ID_BYTES or not is_whole or not num_sequences or not num_ends:
        raise DataError(
            f"{idx_path}: damaged: ids of type {code}, {num_sequences:,} sequences and {num_ends:,} ends of "
            f"documents in {size:,} bytes; copy or prepare the dataset again"
        )
    num_bytes = bin_path.stat().st_size
    if num_bytes == 0:
        raise DataError(f"{bin_path} is empty: copy or prepare the dataset again")
    content = np.memmap(idx_path, np.uint8, "r", INDEX_HEAD.size)
    lengths = content[: 4 * num_sequences].view("<i4")
    offsets = content[4 * num_sequences : 12 * num_sequences].view("<i8")
    ends = content[12 * num_sequences : 12 * num_sequences + 8 * num_ends].view("<i8")
    begin = 0
    for first in range(0, num_sequences, _BLOCK):
        block = lengths[first : first + _BLOCK].astype(np.int64) * _ID_BYTES[code]
        after = begin + np.cumsum(block)
        if block.min() < 0 or (offsets[first : first + _BLOCK] != after - block).any():
            raise DataError(
                f"{idx_path}: damaged: the sequences from number {first:,} do not follow each other; "
                "copy or prepare the dataset again"
            )
        begin = int(after[-1])
    if begin != num_bytes:
        raise DataError(
            f"{bin_path} has {num_bytes} bytes where {idx_path} says {begin}: "
            "copy or prepare the dataset again"
        )
    if ends[0] != 0 or ends[-1] != num_sequences or (ends[1:] < ends[:-1]).any():
        raise DataError(
            f"{idx_path}: damaged: the ends of its documents are not in order; "
            "copy or prepare the dataset again"
        )

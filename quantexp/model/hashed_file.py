"""Writes a safetensors file of a checkpoint, and reads each value from memory once.

The values are written in pieces that fit the second cache of a processor. While a piece is there it is also hashed,
with its tensor and with the file, and checked for NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypedDict

import xxhash

from quantexp.folders import written_beside
from quantexp.model import finite
from quantexp.model.safetensors import content_of, dtype_name, head_of
from quantexp.model.training_state import MAIN

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes of a piece.
PIECE = 1 << 20


class FileHash(TypedDict):
    """Size and hash of one file, and the hashes of its tensors by name, if it is a safetensors file."""

    bytes: int
    xxh3_128: str
    tensors: dict[str, str]


def write_hashed(
    path: Path,
    described: Mapping[str, tuple[str, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
    folder: Path,
) -> FileHash:
    """Write tensors in host memory, under a temporary name that is then renamed.

    Args:
        path: the file.
        described: dtype and shape of each tensor, by name.
        tensors: in the same order; one at a time is taken.
        metadata: the file's.
        folder: the checkpoint's in messages.

    Raises:
        KeyError: a dtype that the format does not support.
        OSError: the file cannot be written.
        RunError: a value is NaN or Inf; there is no file then.
    """
    head, _ = head_of(described, metadata)
    whole, hashes = xxhash.xxh3_128(head), {}
    with written_beside(path) as part, part.open("wb") as stream:
        stream.write(head)
        for name, tensor in zip(described, tensors, strict=True):
            dtype, shape = described[name]
            assert (dtype_name(tensor), [*tensor.shape]) == (dtype, [*shape])
            values = tensor.detach().contiguous().view(-1)
            digest = xxhash.xxh3_128()
            if not _write(stream, values, (digest, whole)):
                raise finite.refusal(name.removeprefix(f"{MAIN}/"), tensor, folder)
            hashes[name] = digest.hexdigest()
        size = stream.tell()
    return {"bytes": size, "xxh3_128": whole.hexdigest(), "tensors": hashes}


def _write(stream: BinaryIO, values: Tensor, digests: Sequence[xxhash.xxh3_128]) -> bool:
    """Write and hash contiguous values [N] until a piece has a NaN or Inf; whether none had."""
    content, size = content_of(values), values.element_size()
    step = PIECE // size
    for first in range(0, values.numel(), step):
        piece, part = content[first * size : (first + step) * size], values[first : first + step]
        for digest in digests:  # the fastest reader from memory comes first
            digest.update(piece)
        if not finite.is_finite(part):
            return False
        stream.write(piece)
    return True

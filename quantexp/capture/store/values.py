"""Loads a captured tensor's values from the location in its manifest line, validated and memory-mapped; hashes them.

A line names a file (`file`), or a shard with the values' key and location in it (`file`, `key`, `offsets`: the first
byte and the one after the last). For any content of a line, only files in the capture folder are read and no code is
run.

The hash is XXH3 of the values' bytes in index order. It detects damage and distinguishes tensors, with the collision
probability of 128 random bits (XXH3, Collet, xxHash's documentation, "XXH3 algorithm overview"). No hash beside the
values would protect against forgery. XXH3 runs at the speed of memory, which matters because training needs the same
cores; a cryptographic hash (BLAKE3) takes four times the work. A hash without a prefix is the SHA-256 of an older
capture.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from quantexp.capture.store.manifest import MANIFEST
from quantexp.errors import CaptureError
from quantexp.model.safetensors import DTYPES, content_of
from quantexp.model.torch_file import load_torch_file

#: The keys of a line that locate values, which the values' own metadata lacks.
PLACE = frozenset({"file", "key", "offsets", "bytes", "hash"})
_XXH3 = "xxh3_128:"


def identity(metadata: Mapping[str, Any]) -> tuple[str, str | None]:
    """The identity of stored values: the file, and the key in a shard."""
    key = metadata.get("key")
    return str(metadata["file"]), key if key is None else str(key)


def path_of(folder: Path, metadata: Mapping[str, Any]) -> Path:
    """The file of a line.

    Raises:
        CaptureError: the file is outside the folder, or its name is invalid.
    """
    return _inside(folder, str(metadata["file"]))


def name_of(folder: Path, metadata: Mapping[str, Any]) -> str:
    """The tensor's name in the folder, without a suffix, equal in every kind of store.

    Raises:
        CaptureError: the name leads out of the folder.
    """
    key = metadata.get("key")
    name = str(metadata["file"]).removesuffix(".pt") if key is None else str(key)
    return str(_inside(folder, name).relative_to(_resolved(folder.absolute())))


def _inside(folder: Path, name: str) -> Path:
    try:
        path = (folder / name).resolve()
    except ValueError as error:  # a null character
        raise CaptureError(
            f"{folder / MANIFEST} names {name!r}, which is no file's name"
        ) from error
    if not path.is_relative_to(_resolved(folder.absolute())):
        raise CaptureError(f"{folder / MANIFEST} names {name}, which is outside the folder")
    return path


@lru_cache(maxsize=64)
def _resolved(folder: Path) -> Path:
    """The folder's resolved path, cached because a collection has thousands of files."""
    return folder.resolve()


def load_values(path: Path, metadata: Mapping[str, Any]) -> Tensor:
    """The values of a line in its file, memory-mapped copy-on-write.

    Raises:
        CaptureError: the file is missing, is not a file of captured values, holds no plain numbers, or stores fewer
            bytes than its shape takes.
    """
    _require_file(path)
    if metadata.get("key") is None:
        return _values(path, _content(path))
    return _of_shard(path, metadata)


def _require_file(path: Path) -> None:
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # an invalid file name
        is_file = False
    if not is_file:
        raise CaptureError(f"{path} is missing although it is listed; capture again")


def metadata_in(path: Path) -> dict[str, Any]:
    """The metadata in a tensor's own file; empty if the file has none.

    Raises:
        CaptureError: the file is missing, or is not a file of captured values.
    """
    _require_file(path)
    content = _content(path)
    metadata = content.get("metadata") if isinstance(content, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _content(path: Path) -> Any:
    """The content of a tensor's own file, with memory-mapped values."""
    try:
        return load_torch_file(path, weights_only=True)
    except Exception as error:  # an unpickler may raise any exception on other bytes
        raise CaptureError(
            f"{path} is refused: it is no file of captured values, is damaged, or holds more than tensors and plain "
            "data"
        ) from error


def _values(path: Path, content: Any) -> Tensor:
    tensor = content.get("tensor") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise CaptureError(f"{path} holds no tensor; was it captured?")
    is_plain = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested
    is_packed = tensor.is_quantized or tensor.dtype is torch.float4_e2m1fn_x2
    if not is_plain or tensor.is_complex() or is_packed:
        where = "" if tensor.is_cpu else f" on {tensor.device}"
        raise CaptureError(
            f"{path} holds no plain numbers, got {tensor.dtype}, {tensor.layout}{where}"
        )
    needed, stored = tensor.nbytes, tensor.untyped_storage().nbytes()
    if needed > stored:
        raise CaptureError(
            f"{path} is refused: its shape {list(tensor.shape)} takes {needed:,} bytes, and {stored:,} are stored"
        )
    return tensor.detach().resolve_neg()


def _of_shard(path: Path, metadata: Mapping[str, Any]) -> Tensor:
    key = metadata["key"]
    try:
        start, stop = (int(offset) for offset in metadata["offsets"])
        shape = [int(extent) for extent in metadata["shape"]]
        if metadata["dtype"] not in DTYPES or min(shape, default=0) < 0:
            raise ValueError(metadata["dtype"])
        dtype: torch.dtype = getattr(torch, metadata["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(
            f"the manifest's line of {key} lacks offsets, shape or dtype of its values in {path}"
        ) from error
    fits = stop - start == math.prod(shape) * dtype.itemsize
    if not (fits and start >= 0 and stop <= path.stat().st_size):
        raise CaptureError(
            f"{path} does not hold {key} at bytes {start} to {stop} as {metadata['dtype']} {shape}: the shard or the "
            "manifest is damaged"
        )
    if start == stop:
        return torch.empty(shape, dtype=dtype)
    content = np.memmap(path, np.uint8, mode="c", offset=start, shape=(stop - start,))
    raw = torch.from_numpy(content)
    raw = raw if start % dtype.itemsize == 0 else raw.clone()
    return raw.view(dtype).view(shape)


def content_hash(values: Tensor) -> str:
    """`xxh3_128:` and 32 hex digits, over a CPU tensor's bytes without its shape and dtype."""
    return _XXH3 + xxhash.xxh3_128_hexdigest(content_of(values))


def has_hash(values: Tensor, expected: str) -> bool:
    """Whether a CPU tensor's bytes have the manifest's hash.

    Raises:
        CaptureError: the kind of hash is unknown.
    """
    if expected.startswith(_XXH3):
        return content_hash(values) == expected
    kind, colon, _ = expected.partition(":")
    if colon:
        raise CaptureError(
            f"a hash of the kind {kind} cannot be checked here, only xxh3_128 and SHA-256"
        )
    return hashlib.sha256(content_of(values)).hexdigest() == expected

"""Published weights on disk: lists their tensors, and reads values row by row, memory-mapped.

The source is a folder with `model.safetensors`, or shards with `model.safetensors.index.json`, or one such file.
Opening reads only the headers and imports no torch. Values are read through a memory mapping, and its pages are
released once they have been copied, so that no file is ever in memory as a whole. Only safetensors files are read: a
pickle can execute code.

The format is that of https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
#: Supported dtypes by the format's names: torch's name, and bytes per element.
DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
#: A longer header is invalid (the reference implementation's limit).
_LARGEST_HEADER = 100_000_000
#: For a tensor larger than all pieces together, this many equally spaced pieces of this many bytes are hashed.
_PIECES, _PIECE_BYTES = 16, 1 << 14


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    #: The format's name.
    dtype: str
    shape: tuple[int, ...]
    #: Range of bytes in the file.
    start: int
    stop: int


@dataclass(frozen=True)
class Weights:
    """The tensors of a published model, by their published names."""

    path: Path
    tensors: dict[str, Stored]

    @property
    def files(self) -> list[Path]:
        """Every file with at least one of the tensors."""
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def config(self) -> Path:
        """The path of the published configuration, which may not exist."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return folder / CONFIG

    def fingerprint(self) -> str:
        """The sha256, in hex, of names, dtypes, shapes and values; independent of paths and the split into files.

        Of a tensor above 256 KiB only 16 pieces of 16 KiB at equal spacing are hashed, from the very first to the very
        last byte: further training of a tensor changes the hash, a change of single values may not.
        """
        digest = hashlib.sha256()
        for name, stored in sorted(self.tensors.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
            with stored.file.open("rb") as stream:
                for start, count in _pieces(stored):
                    stream.seek(start)
                    digest.update(stream.read(count))
        return digest.hexdigest()


def open_weights(path: Path) -> Weights:
    """The headers of all files.

    Raises:
        DataError: nothing there, another format, a missing shard, or a damaged file.
    """
    files = _files(path)
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(file).items():
            if name in tensors:
                raise DataError(
                    f"{name} is in {tensors[name].file} and in {file}: a shard of another model?"
                )
            tensors[name] = stored
    return Weights(path, tensors)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if (path / INDEX).is_file():
            return _shards(path / INDEX)
        if (path / SINGLE).is_file():
            return [path / SINGLE]
        pickles = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        beside = (
            f"; {pickles[0].name} is a pickle, which could run code, and is not read"
            if pickles
            else ""
        )
        raise DataError(f"{path} holds neither {SINGLE} nor {INDEX}{beside}")
    if not path.is_file():
        raise DataError(
            f"{path} is missing; give a folder with {SINGLE} or {INDEX}, or such a file"
        )
    return _shards(path) if path.suffix == ".json" else [path]


def _shards(index: Path) -> list[Path]:
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        names = sorted(str(name) for name in named)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{index} is no index of shards: it has no weight_map that names files"
        ) from error
    missing = [
        name for name in names if Path(name).name != name or not (index.parent / name).is_file()
    ]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise DataError(
            f"{index} names files that are not beside it: {', '.join(missing[:5])}{more}; "
            "fetch the whole model"
        )
    return [index.parent / name for name in names]


def _header(file: Path) -> dict[str, Stored]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError("its header does not fit into it")
            content = json.loads(stream.read(length))
        return {
            name: _stored(file, entry, 8 + length, size)
            for name, entry in content.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is no whole safetensors file: {error}") from error


def _stored(file: Path, entry: dict[str, Any], begin: int, size: int) -> Stored:
    start, stop = (begin + int(offset) for offset in entry["data_offsets"])
    shape, dtype = tuple(int(extent) for extent in entry["shape"]), str(entry["dtype"])
    if min(shape, default=0) < 0 or not begin <= start <= stop <= size:
        raise ValueError("a tensor lies outside it (is the download complete?)")
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype][1]:
        raise ValueError(f"a {dtype} tensor of shape {list(shape)} in {stop - start} bytes")
    return Stored(file, dtype, shape, start, stop)


def _pieces(stored: Stored) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of each hashed piece."""
    size = stored.stop - stored.start
    if size <= _PIECES * _PIECE_BYTES:
        yield stored.start, size
        return
    for piece in range(_PIECES):
        yield stored.start + piece * (size - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES


class Mapped:
    """Maps the files of weights one at a time, when rows of them are requested."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._pages: mmap.mmap | None = None

    def rows(self, stored: Stored, first: int, count: int) -> Tensor:
        """Rows of a tensor as stored; valid until the next call for another file. Writing to them changes no file."""
        import torch

        name, size = DTYPES[stored.dtype]
        width = math.prod(stored.shape[1:])
        self._map(stored.file)
        assert self._pages is not None
        start = stored.start + first * width * size
        raw = torch.frombuffer(
            self._pages, dtype=torch.uint8, offset=start, count=count * width * size
        )
        return raw.view(getattr(torch, name)).view(count, *stored.shape[1:])

    def release(self) -> None:
        """Release the pages that were read; call it only when no rows are in use."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: Path) -> None:
        if file == self._file:
            return
        with file.open("rb") as stream:
            self._pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._file = file


@contextmanager
def mapped() -> Iterator[Mapped]:
    """A reader of rows; releases the files at the end."""
    reader = Mapped()
    yield reader
    reader.release()

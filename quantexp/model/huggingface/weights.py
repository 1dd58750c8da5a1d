"""Published weights on disk: lists their tensors, and reads values row by row.

The source is a folder with `model.safetensors`, or shards with `model.safetensors.index.json`, or one such file.
Opening reads only the headers and imports no torch. Values are read a part of a parameter at a time, so that no file is
ever in memory as a whole. Only safetensors files are read: a pickle can execute code.

The format is that of https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.errors import DataError, UnreadableError
from quantexp.model.huggingface import CONFIG, INDEX, SINGLE
from quantexp.model.safetensors import content_of
from quantexp.model.safetensors_header import Entry, read_header
from quantexp.reading.json_files import require_json

if TYPE_CHECKING:
    from torch import Tensor

#: Supported dtypes by the format's names: torch's name, and bytes per element.
DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
#: For a tensor larger than all pieces together, this many equally spaced pieces of this many bytes are hashed.
_PIECES, _PIECE_BYTES = 16, 1 << 14


@dataclass(frozen=True)
class Stored(Entry):
    """A tensor in a file."""

    file: Path


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
    tensors: dict[str, Stored] = {}
    for file in _files(path):
        for name, entry in read_header(file).items():
            if name in tensors:
                raise DataError(
                    f"{name} is in {tensors[name].file} and in {file}: a shard of another model?"
                )
            tensors[name] = Stored(**vars(entry), file=file)
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
        named = set(require_json(index, dict[str, Any])["weight_map"].values())
        names = sorted(str(name) for name in named)
    except (UnreadableError, KeyError, TypeError, AttributeError) as error:
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


def _pieces(stored: Stored) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of each hashed piece."""
    size = stored.stop - stored.start
    if size <= _PIECES * _PIECE_BYTES:
        yield stored.start, size
        return
    for piece in range(_PIECES):
        yield stored.start + piece * (size - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES


def read_rows(
    stored: Stored, first: int, count: int, columns: tuple[int, int] | None = None
) -> Tensor:
    """Rows of a tensor as stored, or their elements in the range [start, stop) of columns.

    Nothing else is read. The values are read, not mapped: a file that is cut meanwhile is an error here, where touching
    its pages would kill the process.

    Raises:
        DataError: the file ends before the rows do, or cannot be read.
    """
    import torch

    name, size = DTYPES[stored.dtype]
    width = math.prod(stored.shape[1:])
    start, stop = columns or (0, width)
    raw = torch.empty(count * (stop - start) * size, dtype=torch.uint8)
    begin = stored.start + (first * width + start) * size
    # Whole rows lie together.
    runs, run = (1, len(raw)) if stop - start == width else (count, (stop - start) * size)
    try:
        with stored.file.open("rb", buffering=0) as stream:
            for index in range(runs):
                stream.seek(begin + index * width * size)
                fill(stream, content_of(raw)[index * run : (index + 1) * run])
    except OSError as error:
        raise DataError(f"{stored.file} cannot be read: {error.strerror}") from error
    shape = stored.shape[1:] if runs == 1 else (stop - start,)
    return raw.view(getattr(torch, name)).view(count, *shape)


def fill(stream: FileIO, rest: memoryview) -> None:
    """Read as many bytes as fit.

    Raises:
        DataError: the file ends before.
        OSError: it cannot be read.
    """
    while rest and (num_read := stream.readinto(rest)):
        rest = rest[num_read:]
    if rest:
        raise DataError(f"{stream.name} lacks {len(rest):,} bytes: it was cut while it was read")

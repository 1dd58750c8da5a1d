"""hashes.json of a checkpoint: the XXH3 hash of each file and each tensor, recorded before the folder is published.

Every reader of a checkpoint (a start from it, `model.init_from`, `export`) checks its files first. The hash detects
damage; it does not protect against forgery (XXH3, 128 bits: Collet, xxHash's documentation, "XXH3 algorithm overview").
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

import xxhash

from quantexp.errors import DataError
from quantexp.model.checkpoints import iteration_of
from quantexp.model.huggingface.weights import open_weights

HASHES = "hashes.json"
_PIECE = 1 << 22


class FileHash(TypedDict):
    """Size and hash of one file, and the hashes of its tensors by name, if it is a safetensors file."""

    bytes: int
    xxh3_128: str
    tensors: dict[str, str]


def record_hashes(folder: Path) -> None:
    """Write the hashes of all files of a folder.

    Raises:
        OSError: a file cannot be read, or the hashes cannot be written.
    """
    files = sorted(path for path in folder.iterdir() if path.name != HASHES)
    hashes = {path.name: _hash_of(path) for path in files}
    (folder / HASHES).write_text(json.dumps({"files": hashes}, indent=1) + "\n")


def require_intact(path: Path, leave_out: Collection[str] = ()) -> None:
    """Refuse a checkpoint with a file that differs from what was saved.

    A folder without hashes.json, as earlier versions and other programs write it, is not checked.

    Args:
        path: a checkpoint, or any other folder of weights, or one file in it.
        leave_out: names of files that the caller does not read.

    Raises:
        DataError: names the file, the tensor if there is one, and the checkpoint before it.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / HASHES).is_file():
        return
    try:
        files: dict[str, FileHash] = json.loads((folder / HASHES).read_bytes())["files"]
        damage = [_damage(folder / n, h) for n, h in files.items() if n not in leave_out]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / HASHES} cannot be read ({error!r}); {_earlier(folder)}"
        ) from error
    if words := next(filter(None, damage), None):
        raise DataError(f"{words}; {_earlier(folder)}")


def _damage(path: Path, recorded: FileHash) -> str | None:
    """What is wrong with a file, in words; None if nothing is."""
    if not path.is_file():
        return f"{path} is missing"
    if (size := path.stat().st_size) != recorded["bytes"]:
        return f"{path} is damaged: it has {size:,} bytes, {recorded['bytes']:,} were saved"
    if _digest(path, 0, size) == recorded["xxh3_128"]:
        return None
    try:
        tensors = _tensor_hashes(path)
    except DataError:
        tensors = {}
    changed = [name for name, digest in recorded["tensors"].items() if tensors.get(name) != digest]
    where = f" (first in {changed[0]})" if tensors and changed else ""
    return f"{path} is damaged: its content is not what was saved{where}"


def _earlier(folder: Path) -> str:
    """The last checkpoint before this one, in words."""
    iteration = iteration_of(folder)
    if iteration is None:
        return "copy the weights again"
    earlier = [
        (number, path)
        for path in folder.parent.iterdir()
        if (number := iteration_of(path)) is not None and number < iteration
    ]
    return (
        f"the checkpoint before it is {max(earlier)[1]}" if earlier else "there is none before it"
    )


def _hash_of(path: Path) -> FileHash:
    size = path.stat().st_size
    tensors = _tensor_hashes(path) if path.suffix == ".safetensors" else {}
    return {"bytes": size, "xxh3_128": _digest(path, 0, size), "tensors": tensors}


def _tensor_hashes(path: Path) -> dict[str, str]:
    stored = open_weights(path).tensors
    return {name: _digest(path, each.start, each.stop) for name, each in stored.items()}


def _digest(path: Path, start: int, stop: int) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        stream.seek(start)
        while start < stop and (piece := stream.read(min(_PIECE, stop - start))):
            digest.update(piece)
            start += len(piece)
    return digest.hexdigest()

"""hashes.json of a checkpoint: the XXH3 hash of each file and each tensor, recorded before the folder is published.

Every reader of a checkpoint (a start from it, `model.init_from`, `model.from_hf`, `export`) checks its files first. The
list has a hash of itself and the checkpoint's iteration. The hashes detect damage; they do not protect against forgery
(XXH3, 128 bits: Collet, xxHash's documentation, "XXH3 algorithm overview").

`write_hashed` writes a safetensors file and reads each value from memory once. The values are written in pieces that
fit the second cache of a processor. While a piece is there it is also hashed, with its tensor and with the file, and
checked for NaN and Inf.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

import xxhash

from quantexp.errors import DataError, UnreadableError
from quantexp.folders import written_beside
from quantexp.model import finite
from quantexp.model.checkpoints import STATE, STATE_INDEX, iteration_of
from quantexp.model.huggingface import CONFIG, INDEX
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.safetensors import content_of, dtype_name, head_of
from quantexp.model.training_state import MAIN
from quantexp.reading.json_files import require_json
from quantexp.reading.typed import typed

if TYPE_CHECKING:
    from torch import Tensor


LOG = logging.getLogger(__name__)

HASHES = "hashes.json"
_PIECE = 1 << 22


def record_hashes(
    folder: Path, iteration: int | None = None, known: Mapping[str, FileHash] | None = None
) -> None:
    """Write the hashes of all files of a folder and of its training state.

    Args:
        folder: the folder.
        iteration: that of the checkpoint, which its folder's name must have when it is read.
        known: hashes that are known already, by name: `state/rank00003.safetensors`.

    Raises:
        OSError: a file cannot be read, or the hashes cannot be written.
    """
    names = [path.relative_to(folder).as_posix() for path in _files_in(folder)]
    hashes = dict(known or {})
    hashes |= {n: hash_of(folder / n) for n in names if n not in hashes and n != HASHES}
    content: dict[str, Any] = {"iteration": iteration, "files": dict(sorted(hashes.items()))}
    content["xxh3_128"] = _own_hash(content)
    (folder / HASHES).write_text(json.dumps(content, indent=1) + "\n")


def require_intact(
    path: Path, leave_out: Collection[str] = (), only: Collection[str] | None = None
) -> None:
    """Refuse a checkpoint with a file that differs from what was saved, or that was added for a reader to read.

    A folder without hashes.json, as other programs write it, is not checked; if it is a checkpoint, a warning says so.

    Args:
        path: a checkpoint, or any other folder of weights, or one file in it.
        leave_out: names of files and folders that the caller does not read.
        only: names of the files that the caller reads, if they are few.

    Raises:
        DataError: names the file, the tensor if there is one, and the checkpoint before it.
    """
    folder = path if path.is_dir() else path.parent
    files = _recorded(folder)
    if files is None:
        if iteration_of(folder) is not None:
            LOG.warning("%s is missing: the checkpoint is used without a check", folder / HASHES)
        return
    read = (name for name in files if only is None or name in only)
    names = [name for name in read if not {name, name.partition("/")[0]} & {*leave_out}]
    try:
        damage = (_damage(folder / name, files[name]) for name in names)
        words = next(filter(None, [_added(folder, files), *damage]), None)
    except OSError as error:
        words = f"{error.filename} cannot be read: {error.strerror}"
    if words is not None:
        raise DataError(f"{words}; {_earlier(folder)}")


def saved_files(folder: Path) -> list[Path]:
    """The files that were saved in a checkpoint, without those that were added since."""
    files = _recorded(folder)
    names = files if files is not None else (path.name for path in folder.iterdir())
    return sorted(folder / name for name in names)


def _recorded(folder: Path) -> dict[str, FileHash] | None:
    """The recorded files by name; None without hashes.json."""
    file = folder / HASHES
    if not (file.exists() or file.is_symlink()):
        return None
    try:
        content = require_json(file, dict[str, Any])
        files = typed(content["files"], dict[str, FileHash])
        if content["xxh3_128"] != _own_hash(content):
            raise ValueError("its content does not match its own hash")
        _require_place(folder, content["iteration"])
        for name in files:
            own = name.removeprefix(f"{STATE}/")
            if Path(own).name != own or not own:
                raise ValueError(f"{name!r} is not the name of a saved file")
    except UnreadableError as error:
        raise DataError(f"{error}; {_earlier(folder)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{file} cannot be read ({why}); {_earlier(folder)}") from error
    return files


def _require_place(folder: Path, recorded: int | None) -> None:
    iteration = iteration_of(folder)
    if None not in (recorded, iteration) and recorded != iteration:
        raise DataError(
            f"{folder} holds the checkpoint of iteration {recorded}: it was renamed or copied; {_earlier(folder)}"
        )


def _own_hash(content: dict[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key != "xxh3_128"}
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder and of its training state."""
    found = (*folder.iterdir(), *(folder / STATE).glob("*"))
    return sorted(path for path in found if not (path.name == STATE and path.is_dir()))


def _added(folder: Path, files: dict[str, FileHash]) -> str | None:
    """What was added for a reader to read, in words: an index would lead it to other weights."""
    for path in _files_in(folder):
        is_read = path.suffix == ".safetensors" or path.name in (INDEX, CONFIG, STATE_INDEX)
        if is_read and path.relative_to(folder).as_posix() not in files:
            return f"{path} was not saved with the checkpoint: remove it"
    return None


def _damage(path: Path, recorded: FileHash) -> str | None:
    """What is wrong with a file, in words; None if nothing is."""
    if not path.is_file():
        return f"{path} is {'not a regular file' if path.exists() else 'missing'}"
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


def hash_of(path: Path) -> FileHash:
    """The hashes of a file.

    Raises:
        OSError: it cannot be read.
    """
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

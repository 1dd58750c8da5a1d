"""Megatron's tokenised form of a corpus: `PREFIX.bin` (ids) and `PREFIX.idx` (positions of documents).

By Megatron's rule the ids are uint16 for a vocabulary below 65,500 and int32 otherwise. A pair is complete when its
`.idx` exists: the `.idx` is renamed into place last, and removed first when a pair is replaced.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantexp.errors import DataError
from quantexp.folders import override_word
from quantexp.terminal.close_matches import did_you_mean, near

#: Incremented whenever the same data and seed give another order of samples.
ORDER_VERSION = 1
_MIB = 1 << 20
#: A `.bin` below this size is hashed completely.
_WHOLE_BYTES = 64 * _MIB
#: Number of pieces of one MiB hashed of a larger one, including the first and the last.
_NUM_PIECES = 64


def pair_paths(prefix: Path) -> tuple[Path, Path]:
    """Returns the paths of `.bin` and `.idx`; dots within the prefix are kept."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def check_pair(prefix: Path) -> None:
    """Requires both files of a pair.

    Raises:
        DataError: one is missing; names both paths, and what was perhaps meant.
    """
    if not is_pair(prefix):
        bin_path, idx_path = pair_paths(prefix)
        raise DataError(
            f"no tokenised dataset at {prefix}: expected {bin_path} and {idx_path}; {_remedy(prefix)}"
        )


def is_pair(prefix: Path) -> bool:
    """Returns whether both files of a pair exist."""
    return all(path.is_file() for path in pair_paths(prefix))


def unfinished(prefix: Path) -> str | None:
    """Returns what to do if a preparation at the prefix is not finished."""
    if not partial_path(prefix).is_dir():
        return None
    return f"{partial_path(prefix)} is an unfinished preparation: run its `quantexp prepare` again"


def partial_path(prefix: Path) -> Path:
    """Returns the folder of an unfinished preparation."""
    return Path(f"{prefix}.partial")


def _remedy(prefix: Path) -> str:
    """Returns what to do about a prefix without a pair."""
    if (resume := unfinished(prefix)) is not None:
        return resume
    with suppress(OSError):
        if close := did_you_mean(map(str, _meant(prefix))):
            return close
    if prefix.exists():
        source = override_word("dataset.source", prefix)
        return (
            f"raw text is converted by `quantexp prepare {source}` with "
            "dataset.tokenizer_path=FOLDER, or dataset.tokenizer=byte, which needs nothing; else give "
            "another dataset.path"
        )
    missing = _first_missing(prefix)
    where = "" if missing == prefix else f"there is no folder {missing}; "
    return (
        f"{where}write them with `quantexp prepare` (dataset.tokenizer=byte needs no files of a tokenizer), or give "
        "another dataset.path"
    )


def _first_missing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.parent.is_dir())


def _meant(prefix: Path) -> list[Path]:
    """Returns prefixes of pairs that a prefix without one may stand for.

    These are the prefix of a file of a pair, at most three pairs of a folder, and pairs with a similar name, of their
    own or of a folder above them.
    """
    if prefix.suffix and is_pair(prefix.with_suffix("")):
        return [prefix.with_suffix("")]
    if prefix.is_file():
        return []
    if prefix.is_dir():
        return _pairs(prefix)[:3]
    missing = _first_missing(prefix)
    if missing == prefix:
        pairs = {path.name: path for path in _pairs(prefix.parent)}
    else:
        others = (folder / prefix.relative_to(missing) for folder in missing.parent.iterdir())
        pairs = {
            path.parts[len(missing.parts) - 1]: path for path in sorted(others) if is_pair(path)
        }
    return [pairs[name] for name in near(missing.name, pairs)]


def _pairs(folder: Path) -> list[Path]:
    """Returns the prefixes of the pairs in a folder, sorted."""
    return sorted(p for file in folder.glob("*.idx") if is_pair(p := file.with_suffix("")))


def fingerprint(prefix: Path) -> str:
    """Returns the sha256, in hex, of a pair's content, independent of its path and times.

    It covers the whole `.idx`, the size of `.bin`, and all of a `.bin` below 64 MiB. Of a larger `.bin` it covers 64
    pieces of one MiB at equal spacing, from the very first to the very last byte: a change of single tokens between
    them goes undetected, a change of any document's length or of the order of lengths does not.

    Raises:
        DataError: a file is missing; names both paths.
    """
    check_pair(prefix)
    bin_path, idx_path = pair_paths(prefix)
    size = bin_path.stat().st_size
    digest = hashlib.sha256(f"{idx_path.stat().st_size} {size}\n".encode())
    for path, offsets in ((idx_path, _all_offsets(idx_path)), (bin_path, _bin_offsets(bin_path))):
        with path.open("rb") as stream:
            for offset in offsets:
                stream.seek(offset)
                digest.update(stream.read(_MIB))
    return digest.hexdigest()


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yields a temporary folder on the same disk as `path`, so that files can be renamed from it to `path`.

    Raises:
        DataError: the parent folder of `path` cannot be created or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; give another folder, or fix its permissions"
        ) from error
    with folder as name:
        yield Path(name)


def _all_offsets(path: Path) -> Iterable[int]:
    return range(0, path.stat().st_size, _MIB)


def _bin_offsets(path: Path) -> Iterable[int]:
    """Returns the offsets of the pieces of one MiB."""
    size = path.stat().st_size
    if size < _WHOLE_BYTES:
        return _all_offsets(path)
    return [i * (size - _MIB) // (_NUM_PIECES - 1) for i in range(_NUM_PIECES)]

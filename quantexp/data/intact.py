"""Checks that the files of a prepared pair are the ones that were prepared.

The card records the XXH3 hash of each file. Before training reads a pair, its files are hashed, as fast as the disk is
(XXH3 itself takes some 10 GB/s), and compared. The cache records the hash of a file with its size, times and inode: a
file is hashed once after every change, by one process of a host while the others wait. XXH3 detects damage; it does not
protect against forgery.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from quantexp.data.binary import pair_paths
from quantexp.data.prepared import Card, card_path
from quantexp.errors import DataError
from quantexp.folders import written_beside


def hash_of(path: Path) -> str:
    """Returns the XXH3 hash of a file, 128 bits in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def check_intact(prefix: Path, card: Card, cache_dir: Path) -> None:
    """Requires that the files of a pair have the hashes on its card.

    Raises:
        DataError: a file differs or cannot be read.
    """
    for path, prepared in zip(pair_paths(prefix), card.hashes, strict=True):
        try:
            if _known_hash(path, cache_dir / "hashes") == prepared:
                continue
            actual = hash_of(path)  # the cache itself may be damaged
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if actual != prepared:
            raise DataError(
                f"{path} has changed since it was prepared: its hash is {actual}, where {card_path(prefix)} "
                f"says {prepared}; copy the dataset again, or prepare it again with force=true"
            )


def _known_hash(path: Path, folder: Path) -> str:
    """Returns the hash of a file from the cache, or computes it; without a usable cache it is computed."""
    stat = path.stat()
    stamp = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    record = folder / hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with _locked(record.with_suffix(".lock")):
        with suppress(OSError):
            return record.read_bytes().decode("ascii", "replace")
        actual = hash_of(path)
        with suppress(OSError), written_beside(record) as part:
            part.write_text(actual)
        return actual


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for other processes of this host, where the folder allows locks."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = path.open("a")
    except OSError:
        yield
        return
    with stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield

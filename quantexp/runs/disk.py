"""Writes files whole, and explains why one cannot be written: which file, how much is missing, and what to do.

An `OSError` of `write` does not name its file, and torch's zip writer raises a `RuntimeError` about a position in the
file. `writing` adds the file and its size to both; `explanation` is the line that a user sees.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from quantexp.errors import QuantexpError
from quantexp.folders import sync
from quantexp.terminal.units import human_bytes

#: Errors of a full disk.
FULL = (errno.ENOSPC, errno.EDQUOT)
#: What to do about each error; {disk} is the folder of the file.
_REMEDIES = {
    errno.ENOSPC: "free some space on the disk of {disk}, or set paths.root to another disk",
    errno.EDQUOT: "your quota on the disk of {disk} is used up: delete files there, or set paths.root to another disk",
    errno.EROFS: "the disk of {disk} is mounted read-only: mount it for writing, or set paths.root to another disk",
    errno.EACCES: "give this user the permission to write in {disk}, or set paths.root to another folder",
    errno.EPERM: "give this user the permission to write in {disk}, or set paths.root to another folder",
    errno.EFBIG: "the file would be larger than files may be: see ulimit -f, and the limit of the disk of {disk}",
    errno.EIO: "the disk of {disk}, or its server, fails: see the system's log, or set paths.root to another disk",
    errno.ESTALE: "the server of the disk of {disk} no longer knows the file: see whether it was deleted or the server "
    "restarted",
}


@contextlib.contextmanager
def writing(file: Path, num_bytes: int = 0) -> Iterator[None]:
    """Add the file, and the bytes to be written, to an error of writing it.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = _cause(error, file, num_bytes)
        if cause is None:
            raise
        cause.filename = str(file)
        cause.num_bytes = num_bytes  # type: ignore[attr-defined]
        if cause is error:
            raise
        raise cause from error


def write_whole(file: Path, text: str, *, is_durable: bool = False) -> None:
    """Write a file atomically: to a temporary name beside it, then rename; an error leaves no temporary file.

    With `is_durable`, a later power failure leaves it as it is; otherwise the file may be empty or zero then.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with writing(file, len(text)):
            temporary.write_text(text)
            if is_durable:
                sync(temporary)
            temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync(file.parent)


def _cause(error: Exception, file: Path, num_bytes: int) -> OSError | None:
    """The error of the system behind an error; None if there is none."""
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    if isinstance(error.__context__, OSError):
        return error.__context__
    if "inline_container" in str(error) and _free_bytes(file) < num_bytes:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def explanation(error: OSError) -> str | None:
    """One line about a file that cannot be written; None for an error of another kind."""
    if error.filename is None or error.errno not in _REMEDIES:
        return None
    file = Path(os.fsdecode(error.filename))
    missing = _missing(file, getattr(error, "num_bytes", 0)) if error.errno in FULL else ""
    remedy = _REMEDIES[error.errno].format(disk=file.parent)
    return f"{file} cannot be written ({error.strerror}{missing}); {remedy}"


def first_line(error: Exception) -> str:
    """The error in one line: its own words if it is a user's, else with its type."""
    if isinstance(error, OSError) and (words := explanation(error)) is not None:
        return words
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, QuantexpError) else f"{type(error).__name__}: {first}"


def _missing(file: Path, num_bytes: int) -> str:
    """`: 1.2 GB are to be written, and 3.0 MB are free`."""
    free = human_bytes(_free_bytes(file))
    return (
        f": {human_bytes(num_bytes)} are to be written, and {free} are free"
        if num_bytes
        else f": {free} are free"
    )


def _free_bytes(file: Path) -> int:
    """The free space of a file's disk; 0 if its folder is gone."""
    folder = next((each for each in file.parents if each.is_dir()), None)
    return 0 if folder is None else shutil.disk_usage(folder).free

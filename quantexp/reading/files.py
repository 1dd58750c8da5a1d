"""Opens a file that anyone may have put there: never waits for it, and reads no more than a bound.

Only a regular file is read, with or without a link to it. A FIFO, a socket, a device or a folder in its place is
refused, and so is a file larger than the bound, which a sparse file reaches at no cost.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from quantexp.errors import UnreadableError
from quantexp.terminal.units import human_bytes

#: Bytes of a text file, and levels of nesting in any file.
MOST_TEXT, MOST_LEVELS = 1 << 26, 64


def open_file(file: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is not a regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:  # a file in the place of one of its folders
        raise FileNotFoundError(*error.args, error.filename) from error
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnreadableError(f"{file} must be a file, and is {_kind(mode)}")
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, most: int = MOST_TEXT) -> bytes:
    """The content of a file of at most `most` bytes.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is not a regular file, cannot be read, or is larger.
    """
    with open_file(file) as stream:
        try:
            size = os.fstat(stream.fileno()).st_size
            # room for `most` bytes at once takes longer than the reading of a small file
            content = b"" if size > most else stream.read(size + 1)
            if len(content) > size:  # it has grown
                content += stream.read(most - size)
        except OSError as error:
            raise unreadable(file, error) from error
    size = max(size, len(content))
    if size > most:
        raise UnreadableError(
            f"{file} must have at most {human_bytes(most)}, and has {human_bytes(size)}"
        )
    return content


def read_text(file: Path, most: int = MOST_TEXT) -> str:
    """The content of a UTF-8 file, as `read_bytes` reads it.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: as `read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(file, most)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"{file}, line {line}: it is not UTF-8") from error


def unreadable(file: Path, error: OSError | ValueError) -> UnreadableError:
    """The error for a file that the system cannot open or read."""
    words = error.strerror if isinstance(error, OSError) else error
    return UnreadableError(f"{file} cannot be read: {words}")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")

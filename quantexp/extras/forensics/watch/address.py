"""The token and the port of a watched folder, kept so that a page goes on after a restart of its server.

They are in a file of the user's cache that only the user can read; a file that others can read, or that is another
user's, is not trusted and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.errors import RunError, UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.runs.status import write_json

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,64}")


@dataclass
class Address:
    """Where a page is served."""

    token: str
    port: int


def kept_address(cache: Path, watched: str) -> Address:
    """The address of what is watched: that of the last time, else a new token and port 0, which is any free port."""
    file = _file(cache, watched)
    with contextlib.suppress(OSError, UnreadableError):
        found = file.lstat()
        is_private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
        if is_private and found.st_uid == os.geteuid():
            address = read_json(file, Address, 1 << 12)
            if _TOKEN.fullmatch(address.token) and 0 < address.port < 1 << 16:
                return address
    return Address(secrets.token_urlsafe(24), 0)


def keep_address(cache: Path, watched: str, address: Address) -> None:
    """Keep an address, readable by the user alone.

    Raises:
        RunError: the cache cannot be written.
    """
    file = _file(cache, watched)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        umask = os.umask(0o077)
        try:
            write_json(file, asdict(address))
        finally:
            os.umask(umask)
    except OSError as error:
        raise RunError(
            f"the page's address cannot be kept in {file.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error


def _file(cache: Path, watched: str) -> Path:
    name = hashlib.sha256(watched.encode(errors="surrogateescape")).hexdigest()[:16]
    return cache / "watch" / f"{name}.json"

"""Damage to files, in every way that a disk, a copy or a hand does it; each function returns what it did, in words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

#: Damages a file; returns a description, or None if the file cannot be damaged in this way.
Damage = Callable[[random.Random, Path], str | None]


def flip(source: random.Random, file: Path) -> str | None:
    """Another value of one bit."""
    content = bytearray(file.read_bytes())
    if not content:
        return None
    at, bit = source.randrange(len(content)), source.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {file.name}"


def cut(source: random.Random, file: Path) -> str | None:
    """The end of the file is missing."""
    content = file.read_bytes()
    if not content:
        return None
    kept = source.randrange(len(content))
    file.write_bytes(content[:kept])
    return f"{file.name} cut to {kept} bytes"


def zeros(source: random.Random, file: Path) -> str | None:
    """A range of the file is zero, as after a power failure."""
    content = bytearray(file.read_bytes())
    start = source.randrange(len(content) or 1)
    stop = min(len(content), start + source.choice((1, 16, 512, 4096)))
    if not any(content[start:stop]):
        return None
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)
    return f"bytes {start} to {stop} of {file.name} are zero"


def grow(source: random.Random, file: Path) -> str | None:
    """Bytes after the end."""
    more = source.choice((b"\0", b"\n", b"{}\n", bytes(8)))
    with file.open("ab") as stream:
        stream.write(more)
    return f"{more!r} after the end of {file.name}"


def remove(source: random.Random, file: Path) -> str | None:
    """The file is missing."""
    file.unlink()
    return f"{file.name} removed"


def lines_moved(source: random.Random, file: Path) -> str | None:
    """A line is missing, repeated, or swapped with another."""
    lines = file.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        return None
    one, other = source.sample(range(len(lines)), 2)
    what = source.choice(("removed", "repeated", "swapped"))
    if what == "removed":
        del lines[one]
    elif what == "repeated":
        lines.insert(other, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    file.write_bytes(b"".join(lines))
    return f"line {one + 1} of {file.name} {what} ({other + 1})"


ANY: Sequence[Damage] = (flip, cut, zeros, grow, remove)

"""What a capture keeps when its run goes on from a checkpoint: everything up to that iteration, and nothing after it.

`cut_back` runs before the ranks start, and may be repeated after an interruption. Each rank then counts on from what is
left (`Kept`), so that names, numbers and the budget are those of a run that was never interrupted. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.capture.store.by_type import unlink
from quantexp.capture.store.manifest import (
    HASHES,
    INDEX,
    MANIFEST,
    STATISTICS,
    TOKENS,
    ManifestLine,
    TokenLine,
    join_parts,
    lines_of,
)
from quantexp.errors import UnreadableError
from quantexp.folders import PART, sync, written_beside
from quantexp.reading import json_files
from quantexp.reading.json_files import value_of

#: The files of values that a run writes: see `quantexp.capture.names`, and `ShardFiles`.
_OWN = re.compile(r"\d{8}_\d{6}_\d+_\w.*\.pt|rank\d+-\d+\.safetensors")
#: The timestamp and the number in a name.
_NAME = re.compile(r"(\d{8}_\d{6})_(\d+)_")


@dataclass(frozen=True)
class Kept:
    """What one rank has captured so far."""

    #: At the start of the names of all files; None if there are none.
    timestamp: str | None = None
    #: The number of the rank's next file; None if no rank has one.
    next_number: int | None = None
    #: Bytes of its values.
    num_bytes: int = 0
    #: Tensors with statistics.
    tensors: int = 0


NOTHING = Kept()


def kept(folder: Path, rank: int, world_size: int) -> Kept:
    """What the lists of a folder say of one of `world_size` ranks."""
    stamp, numbers, num_bytes = None, dict[int, set[int]](), 0
    for line in lines_of(folder / MANIFEST):
        name = _NAME.search(str(line.get("key") or line.get("file")))
        if name is None:
            continue
        stamp, number, owner = name[1], int(name[2]), line.get("rank", 0)
        known = numbers.setdefault(owner, set())
        if owner == rank and number not in known:
            num_bytes += line.get("bytes") or 0
        known.add(number)
    tensors = sum(line.get("rank", 0) == rank for line in lines_of(folder / STATISTICS))
    return Kept(stamp, _next_number(numbers, rank, world_size), num_bytes, tensors)


def _next_number(numbers: Mapping[int, Collection[int]], rank: int, world_size: int) -> int | None:
    """The next number of a rank's own sequence, or, after another number of ranks, above all numbers."""
    if not numbers:
        return None
    if all(max(own) == r + 1 + (len(own) - 1) * world_size for r, own in numbers.items()):
        return rank + 1 + len(numbers.get(rank, ())) * world_size
    return max(map(max, numbers.values())) + rank + 1


def cut_back(folder: Path, iteration: int) -> int:
    """Remove everything captured after an iteration; returns the number of files that are listed and missing.

    Raises:
        OSError, UnreadableError: the folder cannot be read or written.
    """
    if not folder.is_dir():
        return 0
    join_parts(folder)
    for name in (INDEX, HASHES):  # written again at the end of the run
        (folder / name).unlink(missing_ok=True)
    for name, kind in ((MANIFEST, ManifestLine), (STATISTICS, ManifestLine), (TOKENS, TokenLine)):
        _cut_list(folder / name, iteration, kind)
    listed = {str(line["file"]) for line in lines_of(folder / MANIFEST) if line.get("file")}
    dropped = [p for p in _values_in(folder) if str(p.relative_to(folder)) not in listed]
    unlink(folder, dropped)
    for path in dropped:
        path.unlink(missing_ok=True)
    return sum(not (folder / file).is_file() for file in listed)


def _cut_list(listing: Path, iteration: int, kind: Any) -> None:
    """Drop the lines of later iterations, and an incomplete last one."""
    if not listing.is_file():
        return
    left = [
        line.text
        for line in json_files.lines_of(listing, _refuse)
        if line.is_ended
        and (value := value_of(line, listing, kind, _refuse)) is not None
        and value.get("iteration", 0) <= iteration
    ]
    with written_beside(listing) as part:
        part.write_bytes(b"".join(left))
        sync(part)


def _values_in(folder: Path) -> Iterator[Path]:
    """Every file of values that a run wrote, whole or not."""
    for path in folder.glob("*/*"):
        if _OWN.fullmatch(path.name.removesuffix(PART)):
            yield path


def _refuse(error: UnreadableError) -> None:
    raise error

"""The lists of a capture folder, and how those of several ranks become one.

Rank 0 appends to `manifest.jsonl` and `statistics.jsonl`, rank N to `manifest.rankN.jsonl` and so on: no rank ever
waits for a lock that another one holds. At the run's end, however it ended, the parts are joined.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.jsonl"
STATISTICS = "statistics.jsonl"


def part_of(listing: Path, rank: int) -> Path:
    """Where a rank writes its lines."""
    return listing if rank == 0 else listing.with_name(f"{listing.stem}.rank{rank}.jsonl")


def join_parts(folder: Path) -> None:
    """Put every rank's lines after rank 0's, and take the parts away.

    A line that a killed rank left unfinished is left out. Interrupted at any moment, the next call ends the work: lines
    that are there already are not put in again.
    """
    for name in (MANIFEST, STATISTICS):
        listing = folder / name
        parts = sorted(folder.glob(f"{listing.stem}.rank*.jsonl"), key=_rank_of)
        if not parts:
            continue
        lines = dict.fromkeys(line for file in (listing, *parts) for line in _whole_lines(file))
        joined = listing.with_name(f".{name}.{os.getpid()}")
        joined.write_bytes(b"".join(lines))
        joined.replace(listing)
        for part in parts:
            part.unlink()


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a list; none where there is no list. What a killed process left unfinished is not one."""
    if not file.is_file():
        return
    with file.open("rb") as stream:  # as text it would end lines at more than "\n"
        for line in stream:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                yield values


def _rank_of(part: Path) -> int:
    return int(part.stem.rpartition(".rank")[2])


def _whole_lines(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    return [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

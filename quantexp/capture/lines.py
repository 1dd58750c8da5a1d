"""The lists of a capture folder: their files and lines, and the lines of single iterations without parsing the others.

A capture of a whole run has hundreds of thousands of lines, in the manifest or, of statistics without values, in the
list of statistics. An `IterationIndex` searches each for its iteration alone, and parses those that are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantexp.capture.store.manifest import MANIFEST, STATISTICS

#: Matches the iteration, which the writer puts before any nested value.
_ITERATION = re.compile(rb'"iteration": ?(\d+)')
#: Lines between two checks of the time.
_STRIDE = 2_000


def lists_of(folder: Path, *names: str) -> list[Path]:
    """The lists of a folder by name, all of them without a name: rank 0's and, during a run, those of other ranks."""
    files = (
        file
        for name in names or (MANIFEST, STATISTICS)
        for file in (folder / name, *sorted(folder.glob(f"{Path(name).stem}.rank*.jsonl")))
    )
    return [file for file in files if file.is_file()]


def torn_lines(folder: Path) -> Iterator[str]:
    """The places of incomplete lines in the lists, which a killed process leaves: `manifest.jsonl:7`."""
    for file in lists_of(folder):
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if (content := line.strip()) and not content.endswith(b"}"):
                    yield f"{file.name}:{number}"


class IterationIndex:
    """The lines of one list and its parts by iteration, up to the moment when `is_late`."""

    def __init__(self, folder: Path, name: str, is_late: Callable[[], bool]) -> None:
        #: Iteration -> files and offsets of its lines.
        self.places: dict[int, list[tuple[Path, int]]] = {}
        #: Whether the lists have more lines.
        self.is_cut = False
        number = 0
        for file in lists_of(folder, name):
            offset = 0
            with file.open("rb") as stream:
                for line in stream:
                    number += 1
                    if number % _STRIDE == 0 and is_late():
                        self.is_cut = True
                        return
                    if match := _ITERATION.search(line):
                        self.places.setdefault(int(match[1]), []).append((file, offset))
                    offset += len(line)

    def read(self, iterations: Iterable[int]) -> list[dict[str, Any]]:
        """The complete lines of these iterations, in the order of the lists."""
        places = sorted(place for one in iterations for place in self.places.get(one, ()))
        lines: list[dict[str, Any]] = []
        for file in dict.fromkeys(file for file, _ in places):
            with file.open("rb") as stream:
                for offset in (offset for named, offset in places if named == file):
                    stream.seek(offset)
                    try:
                        content = json.loads(stream.readline())
                    except ValueError:
                        continue
                    if isinstance(content, dict):
                        lines.append(content)
        return lines


def unlisted(
    statistics: Iterable[Mapping[str, Any]], manifest: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The lines of statistics without a line in the manifest, as lines of tensors without values."""
    listed = {_which(line) for line in manifest}
    for line in statistics:
        if _which(line) not in listed:
            yield {**line, "file": None, "bytes": 0, "hash": None}


def _which(line: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("module", "layer", "operation", "phase", "tensor", "iteration", "micro_batch", "rank")
    return tuple(line.get(key) for key in keys)

"""The journal of finished tensors in an output folder: one line for each tensor, written when it is done.

A line holds while the tensor's file, its place in the tensor's shard and its hash are the same, this version draws it,
and the figures are still there. A line that a crash tore is left out, and so are all that a later one replaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.analysis.draw.work import Done
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.store.manifest import lines_of
from quantexp.runs.status import write_whole

#: The version, incremented when figures or statistics change.
VERSION = 1
NAME = ".drawn.jsonl"


@dataclass(frozen=True)
class Line:
    """One finished tensor."""

    key: list[Any]
    done: Done
    #: Its figures, relative to the output folder.
    files: frozenset[str]


class Journal:
    """The journal of an output folder; `force` starts a new one."""

    def __init__(self, out: Path, *, force: bool = False) -> None:
        #: The output folder.
        self.out = out
        self._file = out / NAME
        self._lines = {} if force else dict(_read(self._file))
        self._begun = False

    def find(self, name: str, key: list[Any], files: Iterable[str]) -> Done | None:
        """The entry of a tensor if all requested figures exist."""
        line = self._lines.get(name)
        if line is None or line.key != key:
            return None
        is_there = all(file in line.files and (self.out / file).is_file() for file in files)
        return line.done if is_there else None

    def add(self, name: str, key: list[Any], files: Iterable[str], done: Done) -> None:
        """Record a finished tensor; figures of an earlier draw stay recorded.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self._begun:
            self._begin()
        line = self._lines.get(name)
        earlier = line.files if line is not None and line.key == key else frozenset()
        self._lines[name] = Line(key, done, earlier.union(files))
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(_text(name, self._lines[name]))

    def _begin(self) -> None:
        """Remove replaced entries."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, "".join(_text(n, line) for n, line in self._lines.items()))
        self._begun = True


def key_of(entry: CapturedTensor) -> list[Any]:
    """The inputs of a tensor's figures and statistics.

    Raises:
        CaptureError: the entry has no file, or one outside its folder.
        OSError: the file is not there.
    """
    stat = os.stat(entry.path)  # noqa: PTH116
    metadata = entry.metadata
    offsets = metadata.get("offsets")
    place = [metadata.get("key"), list(offsets) if offsets else None, metadata.get("hash")]
    return [VERSION, stat.st_size, stat.st_mtime_ns, *place]


def _text(name: str, line: Line) -> str:
    content = {
        "name": name,
        "key": line.key,
        "files": sorted(line.files),
        "finding": line.done.finding,
        "record": line.done.record,
    }
    return json.dumps(content) + "\n"


def _read(file: Path) -> Iterable[tuple[str, Line]]:
    for values in lines_of(file):
        try:
            done = Done(dict(values["record"]), values["finding"])
            yield str(values["name"]), Line(values["key"], done, frozenset(values["files"]))
        except (KeyError, TypeError, ValueError):
            continue

"""The cache of a draw, `.drawn.jsonl` in its output folder: one line for each tensor, picture and chapter that is done.

A line is appended when the work is done, so that an interrupted draw continues. It is valid while the inputs of the
work (its key) are the same and its files exist. Reading skips a line that a crash tore; the last line of a name counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict

from quantexp.analysis.draw.work import Done
from quantexp.analysis.tensors.stamp import stamp_of
from quantexp.capture.reader import CapturedTensor
from quantexp.reading.json_files import json_lines
from quantexp.runs.status import write_whole

#: The version, incremented when figures or statistics change.
VERSION = 1
NAME = ".drawn.jsonl"


@dataclass(frozen=True)
class Line:
    """One finished piece of work."""

    key: Any
    #: Its figures and tables, relative to the output folder.
    files: frozenset[str]
    #: The result for a tensor; None for a picture or chapter.
    done: Done | None = None


class _Written(TypedDict, total=False):
    """A line of the file."""

    name: Required[str]
    key: Required[Any]
    files: Required[list[str]]
    record: dict[str, Any]
    finding: str | None


class Drawn:
    """The cache of an output folder; with `force` it ignores what earlier draws have finished."""

    def __init__(self, out: Path, *, force: bool = False) -> None:
        #: The output folder.
        self.out = out
        self._file = out / NAME
        self._lines = dict(_read(self._file))
        self._ignored = set(self._lines) if force else set()
        self._is_compact = False

    def find(self, name: str, key: Any, files: Iterable[str] | None = None) -> Line | None:
        """The line of a name if its inputs are unchanged and these files, or all of its own, exist."""
        line = self._lines.get(name)
        if line is None or line.key != key or name in self._ignored:
            return None
        expected = line.files if files is None else files
        is_there = all(file in line.files and (self.out / file).is_file() for file in expected)
        return line if is_there else None

    def add(self, name: str, key: Any, files: Iterable[str], done: Done | None = None) -> None:
        """Record finished work; a tensor's figures of an earlier draw stay recorded.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self._is_compact:
            self._compact()
        line = self._lines.get(name)
        earlier = line.files if done and line is not None and line.key == key else frozenset()
        self._lines[name] = Line(key, earlier.union(files), done)
        self._ignored.discard(name)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(_text(name, self._lines[name]))

    def once(
        self,
        name: str,
        inputs: Any,
        draw: Callable[[], Sequence[Path]],
        is_complete: Callable[[], bool] = lambda: True,
    ) -> int:
        """The number of files of a picture or chapter, which is drawn unless its inputs are unchanged.

        Args:
            name: unique among pictures and chapters.
            inputs: everything that the files depend on, as JSON has it.
            draw: writes the files and returns their paths.
            is_complete: whether the result may be kept, called after `draw`.

        Raises:
            OSError: the folder cannot be written.
        """
        name = f"{name}/"  # no tensor has such a name
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        if (line := self.find(name, key)) is not None:
            return len(line.files)
        files = [str(path.relative_to(self.out)) for path in draw()]
        if is_complete():
            self.add(name, key, files)
        return len(files)

    def _compact(self) -> None:
        """Remove replaced and torn lines."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, "".join(_text(n, line) for n, line in self._lines.items()))
        self._is_compact = True


def key_of(entry: CapturedTensor) -> list[Any]:
    """The inputs of a tensor's figures and statistics.

    Raises:
        CaptureError: the entry has no file, or one outside its folder.
        OSError: the file is not there.
    """
    return [VERSION, *stamp_of(entry)]


def _text(name: str, line: Line) -> str:
    content = {"name": name, "key": line.key, "files": sorted(line.files)}
    if line.done is not None:
        content |= {"finding": line.done.finding, "record": line.done.record}
    return json.dumps(content) + "\n"


def _read(file: Path) -> Iterable[tuple[str, Line]]:
    for values in json_lines(file, _Written, lambda error: None):
        done = Done(values["record"], values.get("finding")) if "record" in values else None
        yield values["name"], Line(values["key"], frozenset(values["files"]), done)

"""The table of measures, `measures.jsonl` in the folder of its figures; see `quantexp.analysis.measures`.

A line is appended when its work is done, so that an interrupted draw continues. It is valid while the inputs of the
work (its key) are the same and its files exist.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from quantexp.analysis.measures.measured import Measured, Request
from quantexp.analysis.measures.row import TensorRow, Wanted
from quantexp.capture.names import TensorName
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import UnreadableError
from quantexp.reading.json_files import lines_of, value_of
from quantexp.runs.code_digest import code_digest
from quantexp.runs.disk import write_whole

NAME = "measures.jsonl"
#: What reads, measures and draws, below `quantexp`.
CODE = ("analysis", "capture", "compiled.py", "formats", "model", "quant")


class _Line(TypedDict):
    """What every line of the file has."""

    name: str
    key: str
    files: list[str]


@dataclass(frozen=True)
class Finished:
    """One finished piece of work: a tensor, a picture or a chapter."""

    key: str
    #: Its figures and tables, relative to the folder.
    files: frozenset[str]
    #: The line; as text, its measures take little memory.
    text: str

    @property
    def row(self) -> TensorRow:
        """The measures of a tensor; none of a damaged line."""
        try:
            return TensorRow.of_json(json.loads(self.text))
        except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError):
            return TensorRow()


class MeasuresTable:
    """The table of a folder; with `force` it ignores what earlier commands have finished."""

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        #: The folder of the figures; it need not exist yet.
        self.folder = folder
        self._file = folder / NAME
        self._lines: dict[str, Finished] = {}
        for line in lines_of(self._file, _ignore):
            if (value := value_of(line, self._file, _Line, _ignore)) is not None:
                text = f"{line.text.decode().rstrip()}\n"
                self._lines[value["name"]] = Finished(value["key"], frozenset(value["files"]), text)
        self._ignored = set(self._lines) if force else set()
        self._is_compact = False

    def find(self, name: str, key: str) -> Finished | None:
        """The line of a name if its inputs are unchanged."""
        line = self._lines.get(name)
        return None if line is None or line.key != key or name in self._ignored else line

    def has_files(self, name: str, key: str, files: Iterable[str]) -> bool:
        """Whether these files are drawn from unchanged inputs."""
        line = self.find(name, key)
        return line is not None and all(
            file in line.files and (self.folder / file).is_file() for file in files
        )

    def measured(
        self, entry: CapturedTensor, request: Request, prefix: str = ""
    ) -> Measured | None:
        """The measures of a tensor with values, if they are there.

        Raises:
            CaptureError: it has no file, or one outside its folder.
            OSError: the file is not there.
        """
        line = self.find(prefix + entry.name, key_of(entry))
        if line is None or not (row := line.row).has(Wanted(request=request)):
            return None
        return row.under(request)

    def add(self, name: str, key: str, row: TensorRow, files: Iterable[str] = ()) -> TensorRow:
        """Record finished work; returns its measures with those of unchanged inputs, which stay recorded.

        Raises:
            OSError: the folder cannot be written.
        """
        earlier = self._lines.get(name)
        if earlier is not None and earlier.key == key:
            row, files = earlier.row.updated(row), earlier.files.union(files)
        self._append(name, key, files, row)
        return row

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
        name, key = f"{name}/", _digest([_code(), inputs])  # no tensor has such a name
        if (line := self.find(name, key)) is not None and self.has_files(name, key, line.files):
            return len(line.files)
        files = [str(path.relative_to(self.folder)) for path in draw()]
        if is_complete():
            self._append(name, key, files, TensorRow())
        return len(files)

    def _append(self, name: str, key: str, files: Iterable[str], row: TensorRow) -> None:
        if not self._is_compact:  # replaced and torn lines go
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, "".join(line.text for line in self._lines.values()))
            self._is_compact = True
        content = {"name": name, "key": key, "files": sorted(files), **row.json()}
        line = Finished(key, frozenset(files), f"{json.dumps(content)}\n")
        self._lines[name] = line
        self._ignored.discard(name)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line.text)


def _ignore(error: UnreadableError) -> None:
    """Whatever cannot be read is measured again."""


def name_of(metadata: Mapping[str, Any]) -> str:
    """The name of a tensor with statistics only: as a file's, with iteration, micro-batch and rank at the end."""
    words = ("module", "operation", "phase", "tensor", "quant_type")
    name = TensorName(int(metadata.get("layer", -1)), **{w: str(metadata.get(w)) for w in words})
    when = (("iteration", "i"), ("micro_batch", "m"), ("rank", "r"))
    ends = [f"{letter}{value}" for key, letter in when if (value := metadata.get(key)) is not None]
    return "_".join(
        [
            f"{name.quant_type}/{name.layer_type}",
            *(name.layer_idx, name.operation, name.phase, name.component),
            *(name.quant_type, name.tensor, *ends),
        ]
    )


def key_of(entry: CapturedTensor) -> str:
    """The digest of a tensor, as its list and its files have it, and of the code.

    Raises:
        CaptureError: a file outside the capture's folder.
        OSError: a file is not there.
    """
    files = []
    for stored in entry.stored:
        line = stored.metadata
        if line.get("file"):
            stat = os.stat(stored.path)  # noqa: PTH116
            files.append([stat.st_size, stat.st_mtime_ns, line.get("key"), line.get("hash")])
    return _digest([_code(), entry.metadata, files])


@cache
def _code() -> str:
    return code_digest(parts=CODE)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

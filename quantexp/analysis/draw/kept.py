"""Partial results of a draw that several jobs do (`divided`): files that only these jobs read, as JSON.

    NAME.drawn.json       the statistics of a tensor whose figures are drawn
    NAME.LOOK.json        what a chapter needs of a tensor, of a few looks that take most of the time
    NAME.done.json        a tensor of which everything exists
    LABEL.quick.json      a source whose quick analysis has its numbers

Each has the key of its inputs: of other inputs it is not taken. A file is written whole, so several tasks may do the
same tensor. Numbers come back as they were; those that are not finite are texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from quantexp.analysis.draw.drawn import Drawn, Line
from quantexp.analysis.draw.tensors import Piece, files_of
from quantexp.analysis.draw.work import Done
from quantexp.analysis.numerics.drift import drift_from
from quantexp.analysis.numerics.measured import measure
from quantexp.analysis.numerics.table import measured_of_json, tensor_json
from quantexp.analysis.pool import Pool
from quantexp.analysis.tensors.stamp import stamp_of
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError, UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.runs.work_folder import whole

Item = TypeVar("Item")
Result = TypeVar("Result")
_DRAWN, _DONE, _QUICK = "drawn", "done", "quick"
#: Looks at a tensor whose results are kept -> what JSON has of a result, and the inverse.
_KEPT: dict[Callable[..., Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    measure: (tensor_json, measured_of_json),
    drift_from: (
        lambda value: None if value is None else repr(value),
        lambda text: None if text is None else float(text),
    ),
}


@dataclass(frozen=True)
class Kept:
    """The files of one draw; its folder exists."""

    folder: Path

    def read(self, kind: str, name: str, key: Any) -> Any | None:
        """The value that was kept with the same key; None if there is none."""
        try:
            content = read_json(self._file(kind, name), dict[str, Any])
        except (FileNotFoundError, UnreadableError):
            return None
        return content.get("value") if content.get("key") == key else None

    def write(self, kind: str, name: str, key: Any, value: Any) -> None:
        """Keep a value, which is not None.

        Raises:
            OSError: it cannot be written.
        """
        with whole(self._file(kind, name)) as stream:
            stream.write(json.dumps({"key": key, "value": value}).encode())

    def finish(self, name: str, key: Any) -> None:
        """Record that everything of a tensor exists."""
        self.write(_DONE, name, key, True)

    def is_finished(self, name: str, key: Any) -> bool:
        """Whether everything of a tensor exists."""
        return self.read(_DONE, name, key) is not None

    def quick(self, label: str) -> bool:
        """Whether the numbers of a source's quick analysis are those of this draw."""
        return self.read(_QUICK, label, None) is not None

    def finish_quick(self, label: str) -> None:
        """Record that they are."""
        self.write(_QUICK, label, None, True)

    def pool(self, jobs: int) -> KeptPool:
        """A pool that finds the kept looks, and keeps others."""
        return KeptPool(jobs, self)

    def give(
        self, pieces: Sequence[Piece], figures: Sequence[str], formats: Sequence[str], drawn: Drawn
    ) -> None:
        """Add the tensors that tasks have drawn to the cache of the output folder.

        Raises:
            OSError: it cannot be written.
        """
        part = PartDrawn(drawn, self)
        for piece in pieces:
            files = files_of(piece, figures, formats)
            if drawn.find(piece.name, piece.key, files) is not None:
                continue
            line = part.find(piece.name, piece.key, files)
            if line is not None and line.done is not None:
                drawn.add(piece.name, piece.key, files, line.done)

    def _file(self, kind: str, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=16)
        return self.folder / f"{digest.hexdigest()}.{kind}.json"


class PartDrawn:
    """The statistics of drawn tensors for one task: those of an earlier draw, and those that this task keeps."""

    def __init__(self, earlier: Drawn, kept: Kept) -> None:
        self.out = earlier.out
        self._earlier, self._kept = earlier, kept

    def find(self, name: str, key: Any, files: Iterable[str]) -> Line | None:
        """The line of a tensor if its inputs are unchanged and these files exist."""
        expected = frozenset(files)
        if (line := self._earlier.find(name, key, expected)) is not None:
            return line
        done = self._kept.read(_DRAWN, name, [key, sorted(expected)])
        is_there = done is not None and all((self.out / file).is_file() for file in expected)
        return Line(key, expected, Done(**cast(dict[str, Any], done))) if is_there else None

    def add(self, name: str, key: Any, files: Iterable[str], done: Done) -> None:
        """Keep the statistics of a tensor.

        Raises:
            OSError: they cannot be written.
        """
        self._kept.write(_DRAWN, name, [key, sorted(files)], vars(done))


class KeptPool(Pool):
    """A pool that keeps the results of some looks, and does not look again."""

    def __init__(self, jobs: int, kept: Kept) -> None:
        super().__init__(jobs)
        self._kept = kept

    def each(
        self, look: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | CaptureError | OSError]]:
        """`look(item)`, or its error, for each item in order."""
        if not (isinstance(look, partial) and look.func in _KEPT):
            yield from super().each(look, items)
            return
        entries = cast(Sequence[CapturedTensor], list(items))
        known = {index: self._read(look, entry) for index, entry in enumerate(entries)}
        missing = [entry for index, entry in enumerate(entries) if known[index] is None]
        computed = super().each(cast(Any, look), missing)
        for index, entry in enumerate(entries):
            if (kept := known[index]) is None:
                result = cast(Any, next(computed)[1])
                self._write(look, entry, result)
            else:
                (result,) = kept
            yield cast(Item, entry), result

    def _read(self, look: partial[Any], entry: CapturedTensor) -> tuple[Any] | None:
        """The kept result; None if there is none."""
        try:
            value = self._kept.read(look.func.__name__, _name(entry), _key(look, entry))
            return None if value is None else (_KEPT[look.func][1](value["result"]),)
        except (CaptureError, OSError, ValueError, LookupError, TypeError):
            return None

    def _write(self, look: partial[Any], entry: CapturedTensor, result: Any) -> None:
        if isinstance(result, CaptureError | OSError):
            return
        value = {"result": _KEPT[look.func][0](result)}
        self._kept.write(look.func.__name__, _name(entry), _key(look, entry), value)


def _name(entry: CapturedTensor) -> str:
    return json.dumps([str(entry.folder), *identity(entry.metadata)])


def _key(look: partial[Any], entry: CapturedTensor) -> list[Any]:
    return [repr((look.args, look.keywords)), *stamp_of(entry)]

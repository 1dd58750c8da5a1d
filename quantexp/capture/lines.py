"""The lists of a capture folder: their files and lines, and the lines of single iterations without parsing the others.

A capture of a whole run has hundreds of thousands of lines, in the manifest or, of statistics without values, in the
list of statistics. An `IterationIndex` searches each for its iteration alone, and parses those that are read.
`samples_of` reads `tokens.jsonl`, the samples and tokens of captured micro-batches.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from quantexp.capture.store.manifest import MANIFEST, STATISTICS, TOKENS, ManifestLine, TokenLine
from quantexp.errors import UnreadableError
from quantexp.folders import shell_word
from quantexp.reading import json_files
from quantexp.reading.files import open_file
from quantexp.terminal.escaping import printable

LOG = logging.getLogger(__name__)

#: Matches the iteration, which the writer puts before any nested value.
_ITERATION = re.compile(rb'"iteration": ?(\d{1,18})(?!\d)')
#: The metadata that identifies a tensor within a capture.
_WHICH = ("module", "layer", "operation", "phase", "tensor", "iteration", "micro_batch", "rank")
#: Lines between two checks of the time.
_STRIDE = 2_000
#: Lists and numbers of unreadable lines that this process has warned of.
_WARNED: set[tuple[Path, int]] = set()


def lists_of(folder: Path, *names: str) -> list[Path]:
    """The lists of a folder by name, all of them without a name: rank 0's and, during a run, those of other ranks."""
    files = (
        file
        for name in names or (MANIFEST, STATISTICS, TOKENS)
        for file in (folder / name, *sorted(folder.glob(f"{Path(name).stem}.rank*.jsonl")))
    )
    return [file for file in files if os.path.lexists(file)]


def torn_lines(folder: Path) -> Iterator[str]:
    """The places of incomplete lines in the lists, which a killed process leaves: `manifest.jsonl:7`."""
    for file in lists_of(folder):
        for line in json_files.lines_of(file, lambda error: None):
            if not line.text.rstrip().endswith(b"}"):
                yield f"{file.name}:{line.number}"


def parsed_lines(
    file: Path, report: Callable[[UnreadableError], None]
) -> Iterator[tuple[json_files.Line, dict[str, Any] | None]]:
    """The lines of a list and their content, None with a report if it is wrong, without one if it is unfinished."""
    for line in json_files.lines_of(file, report):
        content = json_files.value_of(line, file, ManifestLine, report)
        yield line, cast(dict[str, Any] | None, content)


class _Place(NamedTuple):
    """Where a line is: its file, its first byte, and its number from 1."""

    file: Path
    offset: int
    number: int


def readable_lines(
    file: Path, report: Callable[[UnreadableError], None] = lambda error: None
) -> Iterator[dict[str, Any]]:
    """The readable lines of a list, in order; reports the others, and warns once of them."""
    unreadable: list[UnreadableError] = []
    for _, content in parsed_lines(file, unreadable.append):
        if content is not None:
            yield content
    warn_of_unreadable(file, unreadable)
    for error in unreadable:
        report(error)


def warn_of_unreadable(file: Path, unreadable: Sequence[UnreadableError]) -> None:
    """Log a warning of the unreadable lines of a list, once in this process for each number of them."""
    if unreadable and (file, len(unreadable)) not in _WARNED:
        _WARNED.add((file, len(unreadable)))
        LOG.warning(
            "%s: %d of its lines cannot be read and are left out, the first: %s; "
            "quantexp captures %s --check shows the damage",
            printable(str(file)),
            len(unreadable),
            printable(str(unreadable[0]).removeprefix(str(file)).lstrip(" ,:")),
            shell_word(str(file.parent)),
        )


def iteration_of(line: bytes) -> int | None:
    """The iteration of a line, without parsing it; None if the line has none."""
    match = _ITERATION.search(line)
    return None if match is None else int(match[1])


class IterationIndex:
    """The lines of one list and its parts by iteration, up to the moment when `is_late`."""

    def __init__(self, folder: Path, name: str, is_late: Callable[[], bool]) -> None:
        #: Iteration -> files and offsets of its lines.
        self.places: dict[int, list[_Place]] = {}
        #: Whether the lists have more lines.
        self.is_cut = False
        #: What is wrong with lines that were read, which are left out.
        self.damage: list[UnreadableError] = []
        number = 0
        for file in lists_of(folder, name):
            for line in json_files.lines_of(file, self.damage.append):
                number += 1
                if number % _STRIDE == 0 and is_late():
                    self.is_cut = True
                    return
                if (iteration := iteration_of(line.text)) is not None:
                    place = _Place(file, line.offset, line.number)
                    self.places.setdefault(iteration, []).append(place)

    def read(self, iterations: Iterable[int]) -> list[dict[str, Any]]:
        """The complete lines of these iterations, in the order of the lists."""
        places = sorted(place for one in iterations for place in self.places.get(one, ()))
        lines: list[dict[str, Any]] = []
        for file in dict.fromkeys(place.file for place in places):
            with open_file(file) as stream:
                for place in (place for place in places if place.file == file):
                    stream.seek(place.offset)
                    line = json_files.Line(place.number, place.offset, stream.readline())
                    value = json_files.value_of(line, file, ManifestLine, self.damage.append)
                    if value is not None:
                        lines.append(dict(value))
            warn_of_unreadable(file, [e for e in self.damage if str(e).startswith(str(file))])
        return lines


def unlisted(
    statistics: Iterable[Mapping[str, Any]], manifest: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The lines of statistics without a line in the manifest, as lines of tensors without values."""
    listed = {tensor_key(line) for line in manifest}
    for line in statistics:
        if tensor_key(line) not in listed:
            yield {**line, "file": None, "bytes": 0, "hash": None}


def tensor_key(line: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    """The identity of a line's tensor within a capture; hashable whatever a damaged line says."""
    values = [line.get(key) for key in _WHICH]
    return tuple(v if v is None or isinstance(v, str | int) else repr(v) for v in values)


@dataclass(frozen=True)
class Sample:
    """One sample of a captured micro-batch."""

    index: int
    ids: list[int]
    texts: dict[str, str]

    def text(self, position: int) -> str:
        """The text of the token at a position."""
        return self.texts.get(str(self.ids[position]), "")


def samples_of(folder: Path) -> dict[tuple[int, int, int], list[Sample]]:
    """(iteration, micro-batch, data-parallel rank) -> its samples; empty for a capture without the list."""
    return {
        (line["iteration"], line["micro_batch"], line["data_rank"]): [
            Sample(index, ids, line["texts"])
            for index, ids in zip(line["samples"], line["tokens"], strict=False)
        ]
        for file in lists_of(folder, TOKENS)
        for line in json_files.json_lines(file, TokenLine, lambda error: None)
        if TokenLine.__annotations__.keys() <= line.keys()
    }

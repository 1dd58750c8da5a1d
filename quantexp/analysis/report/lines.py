"""Selects the tensors of a capture for a report, without parsing the lines of the others as JSON.

A capture of a whole run has hundreds of thousands of lines, in the manifest or, of statistics without values, in the
list of statistics. Each is searched for its iteration alone; those of the iterations that are shown are read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.report.deadline import Deadline
from quantexp.capture.reader import CapturedTensor, lists_of, open_capture, unlisted
from quantexp.capture.store.manifest import MANIFEST, STATISTICS

#: Matches the iteration, which the writer puts before any nested value.
_ITERATION = re.compile(rb'"iteration": ?(\d+)')
#: Lines between two checks of the deadline.
_STRIDE = 2_000

#: A file and the offset of a line in it.
_Place = tuple[Path, int]


@dataclass
class Lines:
    """The shown part of a capture."""

    entries: list[CapturedTensor] = field(default_factory=list)
    #: The shown iterations, and all iterations; ascending.
    shown: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    #: Whether the deadline passed before the end of the manifest.
    is_cut: bool = False


def lines_with_room(folder: Path, max_lines: int, deadline: Deadline) -> Lines:
    """The lines of evenly spaced iterations within the limit; of at least one iteration.

    Raises:
        CaptureError: nothing was captured.
    """
    listed, is_cut = _index(folder, MANIFEST, deadline)
    described, is_cut_too = _index(folder, STATISTICS, deadline)
    if not (listed or described):
        entries = list(open_capture(folder))
        iterations = sorted({int(entry.metadata.get("iteration") or 0) for entry in entries})
        return Lines(entries, iterations, iterations)
    numbers = tuple(sorted({*listed, *described}))
    largest = max(len(places) for index in (listed, described) for places in index.values())
    count = max(1, max_lines // largest)
    shown = milestones(numbers, count) if count > 1 else [numbers[0]]
    of_values, of_statistics = (
        _read(sorted(place for iteration in shown for place in index.get(iteration, ())))
        for index in (listed, described)
    )
    lines = [*of_values, *unlisted(of_statistics, of_values)]
    entries = [CapturedTensor(folder, line) for line in lines]
    return Lines(entries, shown, list(numbers), is_cut or is_cut_too)


def _index(folder: Path, name: str, deadline: Deadline) -> tuple[dict[int, list[_Place]], bool]:
    """The offsets of each iteration's lines in a list and its parts, and whether the deadline passed first."""
    places: dict[int, list[_Place]] = {}
    number = 0
    for file in lists_of(folder, name):
        offset = 0
        with file.open("rb") as stream:
            for line in stream:
                number += 1
                if number % _STRIDE == 0 and deadline.passed:
                    return places, True
                if match := _ITERATION.search(line):
                    places.setdefault(int(match[1]), []).append((file, offset))
                offset += len(line)
    return places, False


def _read(places: list[_Place]) -> list[dict[str, Any]]:
    """The lines at these offsets, without the incomplete line of a killed process."""
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

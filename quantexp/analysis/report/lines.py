"""Selects the tensors of a capture for a report: those of evenly spaced iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.report.deadline import Deadline
from quantexp.capture.lines import IterationIndex, unlisted
from quantexp.capture.reader import CapturedTensor, open_capture
from quantexp.capture.store.manifest import MANIFEST, STATISTICS


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
    listed, described = (
        IterationIndex(folder, name, lambda: deadline.passed) for name in (MANIFEST, STATISTICS)
    )
    if not (listed.places or described.places):
        entries = list(open_capture(folder))
        iterations = sorted({int(entry.metadata.get("iteration") or 0) for entry in entries})
        return Lines(entries, iterations, iterations)
    numbers = tuple(sorted({*listed.places, *described.places}))
    largest = max(len(places) for index in (listed, described) for places in index.places.values())
    count = max(1, max_lines // largest)
    shown = milestones(numbers, count) if count > 1 else [numbers[0]]
    of_values, of_statistics = listed.read(shown), described.read(shown)
    lines = [*of_values, *unlisted(of_statistics, of_values)]
    entries = [CapturedTensor.of(folder, line) for line in lines]
    return Lines(entries, shown, list(numbers), listed.is_cut or described.is_cut)

"""Checks the parts of divided tensors: each lies in its whole tensor, and together they are all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quantexp.capture.captured import CapturedTensor, part_of, whole_tensors
from quantexp.capture.check.problem import Listed, Problem
from quantexp.capture.store.manifest import MANIFEST


def check_parts(folder: Path, manifest: Sequence[Listed], *, is_live: bool) -> Iterator[Problem]:
    """Parts with impossible ranges and, once the run has ended, tensors without all of their parts."""
    parts = []
    for line in manifest:
        if "shard" not in line.content:
            continue
        entry = CapturedTensor.of(folder, line.content)
        try:
            part_of(entry)
        except ValueError as error:
            yield line.problem(f"its {error}")
        else:
            parts.append(entry)
    for tensor in whole_tensors(parts) if not is_live else ():
        if (why := tensor.incompleteness()) is not None:
            yield Problem(MANIFEST, f"{tensor.label}: {why}")

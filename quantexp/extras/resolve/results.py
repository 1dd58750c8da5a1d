"""results.jsonl of a design's folder: a line for each branch, whole and proved or with the reason why not.

    branch       the name that follows from all that decides its numbers; the folder below `branches/`
    run, seed, checkpoint, scheme      `scheme` is the arm's name; `control` is `chaos` or `noise`, else null
    steps, working_loss, scheme_loss   for each horizon the held-out loss, with nothing quantised and under the scheme
    held_out     the first sequence of the unit's text, and how many
    code         the digest of the code that decides numbers
    skipped, cpu_s, failure, time      steps left out; seconds of the processor; why the proof failed, else null

Branches of one run and checkpoint, with the same text, are a unit. A later line of the same branch takes its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from quantexp.errors import UnreadableError
from quantexp.reading.json_files import json_lines
from quantexp.runs.disk import writing

NAME = "results.jsonl"


class Line(TypedDict):
    """A line of results.jsonl."""

    branch: str
    run: str
    seed: int
    checkpoint: int
    scheme: str
    control: str | None
    steps: list[int]
    working_loss: list[float | None]
    scheme_loss: list[float | None]
    held_out: list[int]
    code: str
    skipped: int
    cpu_s: float
    failure: str | None
    time: str


_Line = TypeVar("_Line")


def read_results(folder: Path) -> dict[str, Line]:
    """The lines of a design of branches, as `last_lines`."""
    return last_lines(folder, Line)


def last_lines(folder: Path, kind: type[_Line]) -> dict[str, _Line]:
    """The last line of each branch, by the branch's name; none without the file.

    A last line that a killed process left incomplete is not one.

    Raises:
        UnreadableError: a line is not one of results.jsonl.
    """
    lines: Iterator[Any] = json_lines(folder / NAME, kind, _refuse)
    return {line["branch"]: line for line in lines}


def _refuse(error: UnreadableError) -> None:
    raise error


def cut_incomplete(folder: Path) -> None:
    """Remove a last line that a killed process left incomplete, so that another one can follow.

    Raises:
        OSError: the file cannot be read or written.
    """
    file = folder / NAME
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def append(folder: Path, line: Mapping[str, object]) -> None:
    """Add a line.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / NAME
    text = json.dumps(line, allow_nan=False) + "\n"
    with writing(file, len(text)), file.open("a") as stream:
        stream.write(text)

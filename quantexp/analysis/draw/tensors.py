"""Reads every tensor of the sources once; skips tensors that an earlier draw has finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from quantexp.analysis.chapter import Problems, Source, place_of, progress_bar
from quantexp.analysis.draw.drawn import Drawn, key_of
from quantexp.analysis.draw.statistics_only import statistics_key, statistics_name
from quantexp.analysis.draw.tables import Row
from quantexp.analysis.draw.work import Done, Task, do
from quantexp.analysis.pool import Pool
from quantexp.analysis.tree import DISTRIBUTIONS, FIGURES
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError


@dataclass(frozen=True)
class Piece:
    """One tensor of one source."""

    source: str
    entry: CapturedTensor
    #: Unique among all tensors of the sources; the name of its figures in each folder.
    name: str
    #: The inputs of its figures.
    key: list[Any]
    #: The folders of its figures.
    folders: tuple[str, ...] = FIGURES


def pieces_of(
    sources: Sequence[Source], problems: Problems, *, every_iteration: bool = False
) -> Iterator[Piece]:
    """Of each source every stored tensor, then tensors with statistics only; reports missing files.

    Of statistics the last iteration has figures, or every one: a whole run is captured so, and a figure of each of its
    tensors would take hours.
    """
    lasts = {source.label: _last_iteration(source) for source in sources}
    tensors = (
        (source, entry)
        for source in sources
        for entry in (*source.entries, *source.capture.described())
    )
    for source, entry in tensors:
        prefix = "" if len(sources) == 1 else f"{source.label}/"
        if not entry.metadata.get("file"):
            is_drawn = every_iteration or _iteration(entry) == lasts[source.label]
            folders = (DISTRIBUTIONS,) if is_drawn else ()
            name, key = statistics_name(entry.metadata), statistics_key(entry.metadata)
            yield Piece(source.label, entry, prefix + name, key, folders)
            continue
        try:
            name, key = entry.name, key_of(entry)
        except (CaptureError, FileNotFoundError):
            problems.add(place_of(entry), "is missing although it is listed; capture again")
            continue
        yield Piece(source.label, entry, prefix + name, key)


def _iteration(entry: CapturedTensor) -> int:
    return int(entry.metadata.get("iteration") or 0)


def _last_iteration(source: Source) -> int:
    return max(map(_iteration, source.capture.described()), default=0)


def draw_tensors(
    pieces: Sequence[Piece],
    figures: Sequence[str],
    formats: tuple[str, ...],
    drawn: Drawn,
    pool: Pool,
    problems: Problems,
    console: Console,
) -> tuple[list[Row], int, int]:
    """A row for each readable tensor in order, the number finished before, and the number of figures.

    Raises:
        OSError: a figure cannot be written.
    """
    rows: dict[int, Row] = {}
    missing: list[tuple[int, Task]] = []
    for place, piece in enumerate(pieces):
        line = drawn.find(piece.name, piece.key, files_of(piece, figures, formats))
        if line is None or line.done is None:
            kept = (folder for folder in figures if folder in piece.folders)
            stems = {folder: drawn.out / folder / piece.name for folder in kept}
            missing.append((place, Task(piece.entry, piece.source, stems, formats)))
        else:
            rows[place] = Row(piece.source, piece.entry, line.done)
    num_known = len(rows)
    if num_known and missing:
        console.print(f"{num_known} of {len(pieces)} tensors were drawn before")
    with progress_bar("drawing", len(missing), console) as advance:
        for place, task, outcome in _each(missing, pool, 1 if figures else _TOGETHER):
            advance()
            piece = pieces[place]
            if isinstance(outcome, Done):
                drawn.add(piece.name, piece.key, files_of(piece, figures, formats), outcome)
                rows[place] = Row(piece.source, piece.entry, outcome)
            elif isinstance(outcome, OSError):
                raise outcome
            else:
                problems.add(place_of(task.entry), str(outcome))
    num_figures = sum(len(files_of(pieces[place], figures, formats)) for place in rows)
    return [rows[place] for place in sorted(rows)], num_known, num_figures


#: Tensors of one piece of work if they are only counted: the overhead for a piece is a third of counting a megabyte.
_TOGETHER = 16

_Outcome = Done | CaptureError | OSError


def _each(
    tasks: Sequence[tuple[int, Task]], pool: Pool, together: int
) -> Iterator[tuple[int, Task, _Outcome]]:
    """Every task with its result, in order; the tasks of a group that ended its worker are repeated one by one."""
    groups = [tasks[start : start + together] for start in range(0, len(tasks), together)]
    for group, result in pool.each(_do, groups):
        if isinstance(result, list):
            for (place, task), outcome in zip(group, result, strict=True):
                yield place, task, outcome
        elif len(group) == 1:
            yield *group[0], result
        else:
            yield from _each(group, pool, 1)


def _do(group: Sequence[tuple[int, Task]]) -> list[_Outcome]:
    """The result of each task, or its error, which does not stop the later ones."""
    return [_done(task) for _, task in group]


def _done(task: Task) -> _Outcome:
    try:
        return do(task)
    except (CaptureError, OSError) as error:
        return error


def files_of(piece: Piece, figures: Sequence[str], formats: Sequence[str]) -> list[str]:
    """The figures of a tensor, relative to the output folder."""
    kept = [folder for folder in figures if folder in piece.folders]
    return [f"{folder}/{piece.name}.{kind}" for folder in kept for kind in formats]

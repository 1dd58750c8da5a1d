"""Reads every tensor of the sources once; skips tensors that an earlier draw has finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from quantexp.analysis.chapter import Problems, Source, place_of, progress_bar
from quantexp.analysis.draw.tables import Row
from quantexp.analysis.draw.work import Task, do
from quantexp.analysis.measures.row import TensorRow, Wanted
from quantexp.analysis.measures.table import MeasuresTable, key_of, name_of
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
    #: The inputs of its measures and figures.
    key: str
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
        prefix = prefix_of(source, sources)
        is_bare = not entry.metadata.get("file")
        is_drawn = not is_bare or every_iteration or _iteration(entry) == lasts[source.label]
        try:
            name, key = name_of(entry.metadata) if is_bare else entry.name, key_of(entry)
        except (CaptureError, FileNotFoundError):
            problems.add(place_of(entry), "is missing although it is listed; capture again")
            continue
        folders = () if not is_drawn else (DISTRIBUTIONS,) if is_bare else FIGURES
        yield Piece(source.label, entry, prefix + name, key, folders)


def prefix_of(source: Source, sources: Sequence[Source]) -> str:
    """What the names of a source's tensors begin with in the output folder."""
    return "" if len(sources) == 1 else f"{source.label}/"


def _iteration(entry: CapturedTensor) -> int:
    return int(entry.metadata.get("iteration") or 0)


def _last_iteration(source: Source) -> int:
    return max(map(_iteration, source.capture.described()), default=0)


def draw_tensors(
    pieces: Sequence[Piece],
    wanted: Mapping[str, Wanted],
    figures: Sequence[str],
    formats: tuple[str, ...],
    table: MeasuresTable,
    pool: Pool,
    problems: Problems,
    console: Console,
) -> tuple[list[Row], int, int]:
    """A row for each readable tensor in order, the number finished before, and the number of figures.

    The rows have what is `wanted` of the tensors of each source.

    Raises:
        OSError: a figure cannot be written.
    """
    rows: dict[int, TensorRow] = {}
    missing: list[tuple[int, Task]] = []
    for place, piece in enumerate(pieces):
        line, needed = table.find(piece.name, piece.key), wanted[piece.source]
        row = line.row if line is not None and line.row.has(needed) else None
        stems = {
            folder: table.folder / folder / piece.name
            for folder in figures
            if folder in piece.folders
            and not table.has_files(piece.name, piece.key, files_of(piece, [folder], formats))
        }
        if row is not None and not stems:
            rows[place] = row
            continue
        if row is not None:
            needed = Wanted(record=True)
        missing.append((place, Task(piece.entry, piece.source, needed, stems, formats)))
    num_known = len(rows)
    if num_known and missing:
        console.print(f"{num_known} of {len(pieces)} tensors were drawn before")
    with progress_bar("drawing", len(missing), console) as advance:
        for place, task, outcome in _each(missing, pool, 1 if figures else _TOGETHER):
            advance()
            piece = pieces[place]
            if isinstance(outcome, TensorRow):
                files = files_of(piece, figures, formats)
                rows[place] = table.add(piece.name, piece.key, outcome, files)
            elif isinstance(outcome, OSError):
                raise outcome
            else:
                problems.add(place_of(task.entry), str(outcome))
    num_figures = sum(len(files_of(pieces[place], figures, formats)) for place in rows)
    kept = [Row(pieces[i].source, pieces[i].entry, rows[i]) for i in sorted(rows)]
    return kept, num_known, num_figures


#: Tensors of one piece of work if they are only counted: the overhead for a piece is a third of counting a megabyte.
_TOGETHER = 16

_Outcome = TensorRow | CaptureError | OSError


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

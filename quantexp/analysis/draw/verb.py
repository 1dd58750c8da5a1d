"""`quantexp draw DIR...`: the whole tree of figures and statistics of captured tensors.

    quick_analysis.png   one picture of each run or folder
    tensor_stats.txt     a line for each tensor
    distributions/       a figure for each tensor: histogram over the declared format's grid, box plots, Q-Q plot
    heatmaps/            a figure for each tensor: where its magnitudes are
    statistics/          text, CSV and JSON
    ...                  a folder for each chapter (`chapters`)

Each tensor is read once, by worker processes; what is done is noted (`journal`), so that an interrupted draw goes on.
A file that cannot be used is named and counted, and the rest goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from quantexp.analysis.draw.asked import Asked
from quantexp.analysis.draw.chapter import Source
from quantexp.analysis.draw.chapters import CHAPTERS
from quantexp.analysis.draw.desk import ChapterDesk, Problems, place_of, progress_bar
from quantexp.analysis.draw.journal import Journal, key_of
from quantexp.analysis.draw.pool import Pool, cores
from quantexp.analysis.draw.source import default_out, foreign, open_sources
from quantexp.analysis.draw.tables import STATISTICS, Row, write_tables
from quantexp.analysis.draw.work import FIGURES, Done, Task, do
from quantexp.analysis.quick import QUICK, save_quick_analysis
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError, ConfigError
from quantexp.summary import short_path


@dataclass(frozen=True)
class Outcome:
    """What was drawn."""

    out: Path
    #: Tensors that were looked at, and those of them that an earlier draw had finished.
    num_tensors: int
    num_known: int
    #: File -> why it could not be used.
    problems: dict[str, str]
    #: Figures and tables, those of an earlier draw included.
    num_files: int

    @property
    def words(self) -> str:
        """One line for a person."""
        known = f" ({self.num_known} were drawn before)" if self.num_known else ""
        tensors = f"{self.num_tensors} tensors{known}, " if self.num_tensors else ""
        return f"{tensors}{self.num_files} files in {short_path(self.out)}"


def parts() -> tuple[str, ...]:
    """What `--only` takes."""
    return (QUICK, *FIGURES, STATISTICS, *(chapter.folder for chapter in CHAPTERS))


def draw(asked: Asked, console: Console, complain: Callable[[str], None]) -> Outcome:
    """Draw what is asked for; each file that cannot be used is complained of.

    Raises:
        CaptureError: nothing to draw, filters that leave nothing, or a folder that cannot be written.
        ConfigError: an unknown part, or a filter's value that no tensor has.
        RunError: a run's configuration or a sweep's list that cannot be read.
    """
    wanted = _wanted(asked)
    sources = open_sources(asked.folders, asked.filters)
    out = asked.out if asked.out is not None else default_out(asked.folders, sources)
    problems = Problems(complain)
    for file, why in foreign(sources):
        problems.add(file, why)
    for source in sources:
        _say_what_is_missing(source, console)
    pool = Pool(asked.jobs or cores())
    try:
        with _writing(out):
            return _drawn(asked, wanted, sources, out, pool, problems, console)
    finally:
        pool.close()


def _wanted(asked: Asked) -> tuple[str, ...]:
    if asked.only is None:
        return parts()
    unknown = [name for name in asked.only if name not in parts()]
    if unknown or not asked.only:
        raise ConfigError(
            f"--only must be of {', '.join(parts())}, got {', '.join(unknown) or 'nothing'}"
        )
    return asked.only


def _say_what_is_missing(source: Source, console: Console) -> None:
    left_out = len(source.capture) - len(source.capture.select().with_values())
    if not len(source.capture):
        console.print(f"{source.label}: no tensors were captured", soft_wrap=True, markup=False)
    elif not source.entries:
        console.print(
            f"{source.label}: only statistics were kept of {left_out} tensors, no values to draw; run with "
            "capture=tensors",
            soft_wrap=True,
            markup=False,
        )


def _drawn(
    asked: Asked,
    wanted: Sequence[str],
    sources: list[Source],
    out: Path,
    pool: Pool,
    problems: Problems,
    console: Console,
) -> Outcome:
    num_files = 0
    if QUICK in wanted:
        for source in sources:
            stem = out / QUICK if len(sources) == 1 else out / QUICK / source.label
            num_files += len(save_quick_analysis(source, stem, asked.formats))
    num_tensors = num_known = 0
    if not set(wanted).isdisjoint((*FIGURES, STATISTICS)):
        figures = [folder for folder in FIGURES if folder in wanted]
        rows, num_known = _tensors(asked, figures, sources, out, pool, problems, console)
        num_tensors = len(rows)
        details = STATISTICS in wanted
        num_files += len(write_tables(out, rows, problems.found, details=details))
        num_files += len(rows) * len(figures) * len(asked.formats)
    for chapter in CHAPTERS:
        if chapter.folder in wanted:
            desk = ChapterDesk(out / chapter.folder, asked.formats, pool, problems, console)
            num_files += len(chapter.draw(sources, desk))
    return Outcome(out, num_tensors, num_known, problems.found, num_files)


@dataclass(frozen=True)
class _Piece:
    """One tensor on its way."""

    source: Source
    entry: CapturedTensor
    name: str
    key: list[object]
    #: Figures that are wanted, below the output folder.
    files: list[str]
    task: Task


def _tensors(
    asked: Asked,
    figures: Sequence[str],
    sources: list[Source],
    out: Path,
    pool: Pool,
    problems: Problems,
    console: Console,
) -> tuple[list[Row], int]:
    """A row for each tensor that could be read, in order, and how many were done before."""
    journal = Journal(out, force=asked.force)
    rows: dict[int, Row] = {}
    missing: list[tuple[int, _Piece]] = []
    pieces = list(_pieces(asked, figures, sources, out, problems))
    for place, piece in enumerate(pieces):
        done = journal.find(piece.name, piece.key, piece.files)
        if done is None:
            missing.append((place, piece))
        else:
            rows[place] = Row(piece.source.label, piece.entry, done)
    num_known = len(rows)
    if num_known and missing:
        console.print(
            f"{num_known} of {len(pieces)} tensors were drawn before, {len(missing)} to go"
        )
    with progress_bar("tensors", len(missing), console) as advance:
        for (place, piece), found in pool.each(_do, missing):
            advance()
            if isinstance(found, Done):
                journal.add(piece.name, piece.key, piece.files, found)
                rows[place] = Row(piece.source.label, piece.entry, found)
            elif isinstance(found, OSError):
                raise found
            else:
                problems.add(place_of(piece.entry), str(found))
    return [rows[place] for place in sorted(rows)], num_known


def _do(piece: tuple[int, _Piece]) -> Done:
    return do(piece[1].task)


def _pieces(
    asked: Asked, figures: Sequence[str], sources: list[Source], out: Path, problems: Problems
) -> Iterator[_Piece]:
    """What is to be done; a file that is not there is named."""
    for source in sources:
        for entry in source.entries:
            try:
                name, key = entry.name, key_of(entry)
            except (CaptureError, FileNotFoundError):
                problems.add(place_of(entry), "is missing although it is listed; capture again")
                continue
            name = name if len(sources) == 1 else f"{source.label}/{name}"
            stems = {folder: out / folder / name for folder in figures}
            files = [f"{folder}/{name}.{kind}" for folder in figures for kind in asked.formats]
            task = Task(entry, source.label, stems, asked.formats)
            yield _Piece(source, entry, name, key, files, task)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CaptureError(
            f"{out} cannot be written: {error.strerror or error}; give another with out=FOLDER"
        ) from error

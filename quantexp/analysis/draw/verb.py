"""`quantexp draw DIR...`: the whole tree of figures and statistics of captured tensors.

    quick_analysis.png   one picture of a run or folder; of several, one of all, and quick_analysis/NAME.png of each;
                         with filters quick_analysis.filtered.png, quick_analysis/NAME.filtered.png
    tensor_stats.txt     a line for each tensor
    distributions/       a figure for each tensor: histogram over the declared format's grid, box plots, Q-Q plot; of
                         statistics alone a figure for each of the last iteration
    heatmaps/            a figure for each tensor: where its magnitudes are
    statistics/          text, CSV and JSON; captured: tensors and bytes by type, layer type, operation and module
    ...                  a folder for each chapter
    measures.jsonl       the table of measures, from which all of it is drawn (`quantexp.analysis.measures`)

Worker processes read each tensor once. The table has what is finished, so that an interrupted draw continues. A file
that cannot be used is named and counted, and the others are drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.analysis.chapter import Chapter, Desk, Problems, Source, working
from quantexp.analysis.draw.arguments import Request
from quantexp.analysis.draw.source import default_out, foreign, open_sources
from quantexp.analysis.draw.tables import Row, write_tables
from quantexp.analysis.draw.tensors import Piece, draw_tensors, pieces_of, prefix_of
from quantexp.analysis.measures.measured import Measured, usual_request
from quantexp.analysis.measures.row import Wanted
from quantexp.analysis.measures.table import MeasuresTable
from quantexp.analysis.pool import Pool
from quantexp.analysis.tree import (
    CHAPTER_FOLDERS,
    FIGURES,
    FILTERED,
    MEASURED,
    PARTS,
    QUICK,
    STATISTICS,
)
from quantexp.capture.lines import lists_of
from quantexp.capture.store import manifest
from quantexp.errors import CaptureError, ConfigError
from quantexp.folders import short_path, writing_into
from quantexp.processes.machine import num_cores
from quantexp.runs.paths import RunDir
from quantexp.terminal.console import error_console


@dataclass(frozen=True)
class Outcome:
    """The result of a draw."""

    out: Path
    #: The number of tensors, and of those that an earlier draw had finished.
    num_tensors: int
    num_known: int
    #: File -> why it could not be used.
    problems: dict[str, str]
    #: The number of figures and tables, including those of an earlier draw.
    num_files: int

    @property
    def words(self) -> str:
        """The result in one line."""
        known = f" ({self.num_known} were drawn before)" if self.num_known else ""
        tensors = f"{self.num_tensors} tensors{known}, " if self.num_tensors else ""
        return f"{tensors}{self.num_files} files in {short_path(self.out)}"

    def exit_code(self, complain: Callable[[str], None]) -> int:
        """0, or 1 with a message about the number of unusable files."""
        if problems := len(self.problems):
            several = problems > 1
            complain(
                f"{problems} file{'s' * several} could not be used, {'they are' if several else 'it is'} named above"
            )
        return 1 if problems else 0


def draw(request: Request, console: Console, complain: Callable[[str], None]) -> Outcome:
    """Draw the request; reports each unusable file.

    Raises:
        CaptureError: nothing to draw, filters that leave nothing, or a folder that cannot be written.
        ConfigError: an unknown part, or a filter's value that no tensor has.
        RunError: a run's configuration or a sweep's list that cannot be read.
    """
    wanted = wanted_parts(request)
    sources = open_sources(
        request.folders,
        request.filters,
        lambda line: console.print(line, soft_wrap=True, markup=False),
    )
    out = request.out if request.out is not None else default_out(request.folders, sources)
    problems = Problems(complain)
    for file, why in foreign(sources):
        problems.add(file, why)
    for source in sources:
        for words in source.damage:
            problems.add(words, words)
        _say_what_is_missing(source, console)
    pool = Pool(request.jobs or num_cores())
    with contextlib.closing(pool), writing_into(out, CaptureError, "out=FOLDER"):
        return _drawn(request, wanted, sources, out, pool, problems, console)


def output_of(request: Request) -> Path:
    """The output folder of a request that can be drawn.

    Raises:
        CaptureError: nothing to draw, or filters that leave nothing.
        ConfigError: an unknown part, or a filter's value that no tensor has.
        RunError: a run's configuration or a sweep's list that cannot be read.
    """
    wanted_parts(request)
    sources = open_sources(request.folders, request.filters)
    return request.out if request.out is not None else default_out(request.folders, sources)


def draw_run(run: RunDir) -> Outcome:
    """Draw everything as PNG for `analysis.auto=true` at the end of a run, with messages in the run's log."""
    request = Request([str(run.root)], out=run.figures)
    log = error_console()
    return draw(request, log, lambda line: log.print(line, soft_wrap=True, markup=False))


def wanted_parts(request: Request) -> tuple[str, ...]:
    """The requested parts of the tree.

    Raises:
        ConfigError: an unknown part.
    """
    if request.only is None:
        return PARTS
    unknown = [name for name in request.only if name not in PARTS]
    if unknown or not request.only:
        raise ConfigError(
            f"--only must be of {', '.join(PARTS)}, got {', '.join(unknown) or 'nothing'}"
        )
    return request.only


def _inputs(request: Request, sources: Sequence[Source], pieces: Sequence[Piece]) -> list[Any]:
    """What a chapter depends on; its first part alone is what a picture does."""
    statistics = [
        _size_and_time(file)
        for source in sources
        for file in lists_of(source.capture.folder, manifest.STATISTICS)
    ]
    about = [request.formats, [[piece.name, piece.key] for piece in pieces], statistics]
    return [about, [sorted(request.filters.items()), [source.label for source in sources]]]


def _say_what_is_missing(source: Source, console: Console) -> None:
    words = None
    if not len(source.capture):
        words = "no tensors were captured"
    elif not source.entries:
        words = (
            f"statistics of {len(source.capture)} tensors, no values: heatmaps and attention_maps are left out, "
            "capture=tensors has them"
        )
    if words is not None:
        console.print(f"{source.label}: {words}", soft_wrap=True, markup=False)


def _drawn(
    request: Request,
    wanted: Sequence[str],
    sources: Sequence[Source],
    out: Path,
    pool: Pool,
    problems: Problems,
    console: Console,
) -> Outcome:
    pieces = list(pieces_of(sources, problems, every_iteration="iteration" in request.filters))
    about, chosen = _inputs(request, sources, pieces)
    table = MeasuresTable(out, force=request.force)
    figures = [folder for folder in FIGURES if folder in wanted]
    has_tables = bool(figures) or STATISTICS in wanted
    rows: list[Row] = []
    num_files = num_known = 0
    if has_tables or not set(MEASURED).isdisjoint(wanted):
        needed = {source.label: _needed(source, wanted) for source in sources}
        rows, num_known, num_files = draw_tensors(
            pieces, needed, figures, request.formats, table, pool, problems, console
        )
    if has_tables:
        details = STATISTICS in wanted
        num_files += len(write_tables(out, rows, problems.reasons, details=details))
        if details and set(wanted) != {STATISTICS}:  # tables alone need no matplotlib
            from quantexp.analysis.draw.captured import FILE_NAME, save_captured

            stem = out / STATISTICS / FILE_NAME
            num_files += len(save_captured(rows, stem, request.formats))
    if QUICK in wanted:
        num_files += _draw_quick(request, sources, table, about, chosen, console)
    measured = [replace(source, measures=_measures(source, rows)) for source in sources]
    for chapter in _chapters(wanted):
        desk = Desk(out / chapter.folder, request.formats, pool, problems, console)
        make = partial(chapter.draw, measured, desk)
        with working(chapter.folder, console):
            num_files += table.once(
                chapter.folder, [about, chosen], make, is_complete=lambda: not problems.reasons
            )
    num_tensors, num_known = (len(rows), num_known) if has_tables else (0, 0)
    return Outcome(out, num_tensors, num_known, problems.reasons, num_files)


def _needed(source: Source, wanted: Sequence[str]) -> Wanted:
    """The measures of a source's tensors that the parts take their numbers from."""
    request = None
    if not {QUICK, *MEASURED}.isdisjoint(wanted):
        request = replace(
            usual_request(source.capture), operands_only=set(MEASURED).isdisjoint(wanted)
        )
    return Wanted(not {*FIGURES, STATISTICS}.isdisjoint(wanted), request)


def _measures(source: Source, rows: Sequence[Row]) -> tuple[Measured, ...]:
    request = usual_request(source.capture)
    return tuple(
        row.measures.under(request)
        for row in rows
        if row.source == source.label and row.measures.has(Wanted(request=request))
    )


def _draw_quick(
    request: Request,
    sources: Sequence[Source],
    table: MeasuresTable,
    about: Sequence[Any],
    chosen: Sequence[Any],
    console: Console,
) -> int:
    """Draw the picture of each source, and of several one of all; returns the number of files."""
    from quantexp.analysis.quick.first_look import FirstLook, first_look
    from quantexp.analysis.quick.overview import save_overview
    from quantexp.analysis.quick.picture import save_quick_analysis

    def look(source: Source) -> FirstLook:
        return first_look(source.capture, table, prefix_of(source, sources))

    def draw_one(source: Source, stem: Path) -> list[Path]:
        return save_quick_analysis(source, look(source), stem, request.formats)

    def draw_all(stem: Path) -> list[Path]:
        return save_overview(sources, [look(source) for source in sources], stem, request.formats)

    num_files, some = 0, FILTERED if request.filters else ""
    for source in sources:
        name = f"{QUICK}{some}" if len(sources) == 1 else f"{QUICK}/{source.label}{some}"
        loss = None if source.run is None else _size_and_time(source.run.metrics)
        make = partial(draw_one, source, table.folder / name)
        with working(name, console):
            num_files += table.once(name, [about, chosen, loss], make)
    if len(sources) > 1:
        name = f"{QUICK}{some}"
        losses = [_size_and_time(s.run.metrics) for s in sources if s.run is not None]
        make = partial(draw_all, table.folder / name)
        num_files += table.once(name, [about, chosen, losses], make)
    return num_files


def _chapters(wanted: Sequence[str]) -> list[Chapter]:
    if set(CHAPTER_FOLDERS).isdisjoint(wanted):
        return []
    from quantexp.analysis.numerics import attention_chapter, chapter, comparison_chapter

    chapters = (chapter.CHAPTER, comparison_chapter.CHAPTER, attention_chapter.CHAPTER)
    return [chapter for chapter in chapters if chapter.folder in wanted]


def _size_and_time(file: Path) -> list[int] | None:
    if not file.is_file():
        return None
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]

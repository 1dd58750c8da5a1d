"""Draws some of the tensors of a request, as one of several tasks, and keeps what the last job needs of them.

Figures go into the output folder. Statistics, and what the chapters need of each tensor, are kept (`kept`). With the
first tensor of a source, what its quick analysis shows is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from quantexp.analysis.chapter import Problems, Source
from quantexp.analysis.draw.arguments import Request
from quantexp.analysis.draw.drawn import Drawn
from quantexp.analysis.draw.kept import Kept, KeptPool, PartDrawn
from quantexp.analysis.draw.tensors import Piece, draw_tensors, files_of, tensors_of
from quantexp.analysis.draw.verb import figures_of, quick_name, wanted_parts
from quantexp.analysis.numerics.comparison_chapter import look_from, reference_of
from quantexp.analysis.numerics.gather import look_of
from quantexp.analysis.quick.first_look import first_look
from quantexp.analysis.tree import CHAPTER_FOLDERS, FIGURES, QUICK, STATISTICS
from quantexp.capture.reader import CapturedTensor

_NUMERICS, _COMPARISONS, _ = CHAPTER_FOLDERS


@dataclass(frozen=True)
class Part:
    """A request, which has an output folder, with its sources and the partial results of all tasks."""

    request: Request
    sources: Sequence[Source]
    kept: Kept

    def draw(self, pieces: Sequence[Piece], problems: Problems, console: Console) -> None:
        """Draw tensors and keep their results; those that cannot be used are reported and stay unfinished.

        Raises:
            OSError: a file cannot be written.
        """
        starts = starts_of(self.sources)
        for piece in pieces:
            if piece.index in starts:
                self._look_first(starts[piece.index])
        with closing(KeptPool(self.request.jobs or 1, self.kept)) as pool:
            self._look(pieces, pool)
            finished = self._draw(pieces, pool, problems, console)
        for piece in finished:
            self.kept.finish(piece.name, piece.key)

    def _draw(
        self, pieces: Sequence[Piece], pool: KeptPool, problems: Problems, console: Console
    ) -> list[Piece]:
        """Draw the figures; returns the tensors that have all of them."""
        request, wanted = self.request, wanted_parts(self.request)
        if set(wanted).isdisjoint((*FIGURES, STATISTICS)):
            return list(pieces)
        assert request.out is not None
        figures, formats = figures_of(wanted), request.formats
        drawn = PartDrawn(Drawn(request.out, force=request.force), self.kept)
        draw_tensors(pieces, figures, formats, drawn, pool, problems, console)
        return [p for p in pieces if drawn.find(p.name, p.key, files_of(p, figures, formats))]

    def _look(self, pieces: Sequence[Piece], pool: KeptPool) -> None:
        """Keep what the chapters need of each stored tensor."""
        stored = [piece for piece in pieces if piece.entry.metadata.get("file")]
        for source in self.sources:
            entries = [piece.entry for piece in stored if piece.source == source.label]
            for look in self._looks(source):
                for _ in pool.each(look, entries):
                    pass

    def _looks(self, source: Source) -> Iterator[Callable[[CapturedTensor], Any]]:
        wanted, reference = wanted_parts(self.request), reference_of(self.sources)
        if not {_NUMERICS, _COMPARISONS}.isdisjoint(wanted):
            yield look_of(source)
        if _COMPARISONS in wanted and source is not reference:
            yield look_from(reference)

    def _look_first(self, source: Source) -> None:
        """Leave the numbers of a source's quick analysis in the output folder."""
        if QUICK not in wanted_parts(self.request) or self.kept.quick(source.label):
            return
        assert self.request.out is not None
        keep = self.request.out / f"{quick_name(self.request, source, self.sources)}.json"
        first_look(source.capture, keep, force=self.request.force)
        self.kept.finish_quick(source.label)


def starts_of(sources: Sequence[Source]) -> dict[int, Source]:
    """The number of the first tensor of each source, as `tensors_of` counts them."""
    starts: dict[int, Source] = {}
    label = None
    for index, (source, _) in enumerate(tensors_of(sources)):
        if source.label != label:
            starts[index], label = source, source.label
    return starts

"""A draw divided among jobs: its parts are the captured tensors. See `quantexp.launch.divided_work`.

A task draws the figures of its tensors into the output folder and keeps their statistics beside it, with what the
chapters need of each; with the first tensor of a source it counts what the quick analysis shows. The last job runs the
ordinary command, which finds all this, and draws what needs several tensors.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.console import Console

from quantexp.analysis.chapter import Problems, Source
from quantexp.analysis.draw.arguments import Request
from quantexp.analysis.draw.drawn import VERSION
from quantexp.analysis.draw.kept import Kept
from quantexp.analysis.draw.part import Part, starts_of
from quantexp.analysis.draw.source import default_out, open_sources
from quantexp.analysis.draw.tensors import Piece, pieces_of, tensors_of
from quantexp.analysis.draw.verb import draw, is_each_iteration, is_whole, wanted_parts
from quantexp.analysis.tree import QUICK
from quantexp.errors import CaptureError
from quantexp.processes.groups import balanced, num_groups
from quantexp.reading.json_files import require_json
from quantexp.runs.work_folder import WorkFolder
from quantexp.terminal.console import output_console
from quantexp.terminal.messages import complain


@dataclass(frozen=True)
class DrawFolder(WorkFolder):
    """`OUTPUT.partial`: what `Kept` keeps."""

    activity = "draws"
    elsewhere = "out="
    error = CaptureError


@dataclass(frozen=True)
class Content:
    """A request as its jobs read it; see `Request`."""

    folders: list[str]
    filters: dict[str, str]
    out: str
    formats: list[str]
    only: list[str] | None
    force: bool
    jobs: int | None

    def request(self) -> Request:
        """The request."""
        only = None if self.only is None else tuple(self.only)
        more = {"out": Path(self.out), "formats": tuple(self.formats), "only": only}
        return Request(**asdict(self) | more)


@dataclass(frozen=True)
class DividedDraw:
    """A request, which has an output folder, and its division."""

    request: Request
    sources: list[Source]
    verb: str = "draw"
    parts: str = "tensors"

    @cached_property
    def num_parts(self) -> int:
        """The number of tensors."""
        return len(tensors_of(self.sources))

    @property
    def content(self) -> Content:
        """The request."""
        more = {"filters": dict(self.request.filters), "out": str(self.result)}
        return Content(**vars(self.request) | more)

    @cached_property
    def folder(self) -> DrawFolder:
        """`OUTPUT.partial`."""
        return DrawFolder(self.result.with_name(f"{self.result.name}.partial"), self._hash)

    @property
    def result(self) -> Path:
        """The output folder."""
        assert self.request.out is not None
        return self.request.out.absolute()

    def groups(self) -> list[list[int]]:
        """The tensors without partial results, in groups of about the same number of bytes."""
        if is_whole(self.request, self.sources):
            return []
        pieces = [piece for piece in self._pieces(None) if not self._is_finished(piece)]
        sizes = [int(e.metadata.get("bytes") or 0) for _, e in tensors_of(self.sources)]
        if QUICK in wanted_parts(self.request):
            for index, source in starts_of(self.sources).items():
                sizes[index] += source.capture.num_bytes  # its task reads all of them once
        indices = [piece.index for piece in pieces]
        return balanced(sizes, indices, num_groups(len(indices)))

    def begin(self) -> None:
        """Remove the partial results of other requests."""
        self.folder.begin()

    def make(self, group: Sequence[int], console: Console) -> None:
        """Draw the tensors of one task, and look at them for what needs several."""
        pieces = list(self._pieces(group))
        left = [piece for piece in pieces if not self._is_finished(piece)]
        if len(left) < len(pieces):
            console.print(f"resuming: {len(pieces) - len(left)} of {len(group)} tensors are drawn")
        problems = Problems(complain)
        with self.folder.writing():
            Part(self.request, self.sources, self._kept).draw(left, problems, console)
        words = f"{len(group)} of {self.num_parts} tensors are drawn"
        if problems.reasons or len(pieces) < len(group):
            number = len(group) - sum(self._is_finished(piece) for piece in pieces)
            words += f", {number} of them cannot be used: the last job names them"
        console.print(words)

    def join(self, console: Console) -> int:
        """Run the ordinary command, which finds the partial results, and print its outcome."""
        with self.folder.writing():
            self.folder.outputs.mkdir(parents=True, exist_ok=True)
        outcome = draw(self.request, console, complain, self._kept)
        output_console().print(outcome.words, soft_wrap=True, markup=False)
        shutil.rmtree(self.folder.root, ignore_errors=True)
        return outcome.exit_code(complain)

    def _pieces(self, among: Sequence[int] | None) -> list[Piece]:
        """The tensors whose files are there; the last job names the others."""
        problems = Problems(lambda words: None)
        each = is_each_iteration(self.request)
        chosen = None if among is None else frozenset(among)
        return list(pieces_of(self.sources, problems, every_iteration=each, among=chosen))

    def _is_finished(self, piece: Piece) -> bool:
        return self._kept.is_finished(piece.name, piece.key)

    @property
    def _kept(self) -> Kept:
        return Kept(self.folder.outputs)

    @cached_property
    def _hash(self) -> str:
        request = self.request
        about = [VERSION, request.folders, sorted(request.filters.items()), request.formats]
        labels = [[source.label, str(source.capture.folder.absolute())] for source in self.sources]
        keys = ("file", "key", "module", "layer", "tensor", "iteration", "micro_batch", "rank")
        tensors = [[e.metadata.get(key) for key in keys] for _, e in tensors_of(self.sources)]
        decides = [*about, wanted_parts(request), request.force, labels, tensors]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def divided(request: Request) -> DividedDraw:
    """A request as work for jobs.

    Raises:
        CaptureError: nothing to draw, or filters that leave nothing.
        ConfigError: an unknown part, or a filter's value that no tensor has.
        RunError: a run's configuration or a sweep's list that cannot be read.
    """
    wanted_parts(request)
    sources = open_sources(request.folders, request.filters)
    out = request.out if request.out is not None else default_out(request.folders, sources)
    return DividedDraw(replace(request, out=out), sources)


def work_of(file: Path, num_cores: int) -> DividedDraw:
    """The request that was submitted, with a process for each core unless it has their number.

    Raises:
        UnreadableError: the file is damaged.
        QuantexpError: as `divided`.
    """
    request = require_json(file, Content).request()
    return divided(replace(request, jobs=request.jobs or num_cores))

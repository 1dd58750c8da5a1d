"""A chapter: a folder of figures and tables over many captured tensors.

    def draw(sources: Sequence[Source], desk: Desk) -> list[Path]:
        for entry, found in desk.each(look_at_one, entries):    # in worker processes
            ...
        return desk.save(figure, "by_layer")

    CHAPTER = Chapter("comparisons", "between quantisation types", draw)

A chapter is given what the filters left, writes into `desk.out` alone (by `save` and `write_text`, which make the
folder), says in words what it leaves out (`desk.say`), and returns what it wrote. One that has nothing to draw of these
sources returns [] and writes nothing. `draw` catches nothing but what `desk.each` does: a bug keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from quantexp.analysis.tensors.run_record import RunNames
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.runs.paths import RunDir

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = TypeVar("Result")


@dataclass(frozen=True)
class Source:
    """One capture folder, opened and filtered."""

    #: A label that is unique within one `draw`: the name of the run or folder.
    label: str
    #: The filtered tensors, including lines without values; `capture.folder` is their folder.
    capture: Capture
    #: The names in the run's configuration; for a bare folder, the run is the folder's name and the rest None.
    names: RunNames
    #: The run folder; None for a bare capture folder.
    run: RunDir | None = None

    @property
    def scheme(self) -> str:
        """The scheme of the run, or the quantisation types of the tensors if it is unknown."""
        types = {str(e.metadata.get("quant_type")) for e in self.capture}
        return self.names.scheme or ", ".join(sorted(types))

    @property
    def entries(self) -> list[CapturedTensor]:
        """The tensors with values, each stored value once: `entry.torch()`, `entry.metadata`, `entry.label`."""
        return list(self.capture.with_values())


class Desk(Protocol):
    """The services that a chapter draws with: output folder, formats, workers."""

    @property
    def out(self) -> Path:
        """The chapter's folder; it need not exist yet."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The file formats of figures: png, pdf, svg."""

    def say(self, line: str) -> None:
        """Print a line, for instance about an omitted figure."""

    def each(
        self, look: Callable[[CapturedTensor], Result], entries: Iterable[CapturedTensor]
    ) -> Iterator[tuple[CapturedTensor, Result]]:
        """`look(entry)` for each entry, in order, in worker processes with one torch thread each, with a progress bar.

        `look` is a function at the top level of a module, or `functools.partial` of one; its result must be small. An
        entry for which it raises CaptureError or OSError is named, counted (exit code 1) and left out.
        """

    def save(self, figure: Figure, name: str) -> list[Path]:
        """Save `out/name.png` and so on, for each of `formats`; `name` may contain folders."""

    def write_text(self, name: str, text: str) -> Path:
        """Write `out/name`, with its suffix, atomically."""


@dataclass(frozen=True)
class Chapter:
    """A chapter, which `draw` calls once for all sources."""

    #: The folder in the output folder, and the name for `--only`.
    folder: str
    #: A short description.
    title: str
    draw: Callable[[Sequence[Source], Desk], list[Path]]

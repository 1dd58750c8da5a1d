"""A chapter: a folder of figures and tables over many captured tensors, and the services that it draws with.

    def draw(sources: Sequence[Source], desk: Desk) -> list[Path]:
        for entry, result in desk.each(look_at_one, entries):    # in worker processes
            ...
        return desk.save(figure, "by_layer")

    CHAPTER = Chapter("comparisons", "between quantisation types", draw)

A chapter gets the filtered sources, writes only into `desk.out` (by `save` and `write_text`, which create the folder),
prints what it leaves out (`desk.say`), and returns the files that it wrote: [] if there is nothing to draw of these
sources. Only `desk.each` catches errors: a bug keeps its traceback.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.pool import Pool
from quantexp.analysis.tensors.run_record import RunNames
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.errors import CaptureError
from quantexp.runs.disk import write_whole
from quantexp.runs.paths import RunDir
from quantexp.terminal.units import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = TypeVar("Result")
#: Seconds between two lines of progress without a terminal.
LINE_S = 5.0


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
    #: What is wrong with files of the run, which are used as far as they can be read.
    damage: tuple[str, ...] = ()
    #: The measures of the tensors that could be measured, if a chapter needs them.
    measures: tuple[Measured, ...] = ()

    @property
    def scheme(self) -> str:
        """The scheme of the run, or the quantisation types of the tensors if it is unknown."""
        types = {str(e.metadata.get("quant_type")) for e in self.capture}
        return self.names.scheme or ", ".join(sorted(types))

    @property
    def entries(self) -> list[CapturedTensor]:
        """The tensors with values, each stored value once: `entry.torch()`, `entry.metadata`, `entry.label`."""
        return list(self.capture.with_values())


@dataclass
class Problems:
    """Unusable files; each is reported once, when it is met."""

    complain: Callable[[str], None]
    #: File -> why it could not be used.
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, file: str, why: str) -> None:
        """Report a file."""
        if file not in self.reasons:
            self.reasons[file] = why
            self.complain(why if file in why else f"{file}: {why}")


@dataclass
class Desk:
    """The services that a chapter draws with: output folder, formats, workers."""

    #: The chapter's folder; it need not exist yet.
    out: Path
    #: The file formats of figures: png, pdf, svg.
    formats: tuple[str, ...]
    pool: Pool
    problems: Problems
    console: Console

    def say(self, line: str) -> None:
        """Print a line, for instance about an omitted figure."""
        self.console.print(f"{self.out.name}: {line}", soft_wrap=True, markup=False)

    def each(
        self, look: Callable[[CapturedTensor], Result], entries: Iterable[CapturedTensor]
    ) -> Iterator[tuple[CapturedTensor, Result]]:
        """`look(entry)` for each entry, in order, in worker processes with one torch thread each, with a progress bar.

        `look` is a function at the top level of a module, or `functools.partial` of one; its result must be small. An
        entry for which it raises CaptureError or OSError is named, counted (exit code 1) and left out.
        """
        listed = list(entries)
        with progress_bar(self.out.name, len(listed), self.console) as advance:
            for entry, result in self.pool.each(look, listed):
                advance()
                if isinstance(result, CaptureError | OSError):
                    self.problems.add(place_of(entry), str(result))
                else:
                    yield entry, result

    def save(self, figure: Figure, name: str) -> list[Path]:
        """Save `out/name.png` and so on, for each of `formats`; `name` may contain folders."""
        from quantexp.analysis.style import save_figure

        return save_figure(figure, self.out / name, self.formats)

    def write_text(self, name: str, text: str) -> Path:
        """Write `out/name`, with its suffix, atomically."""
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        return path


def place_of(entry: CapturedTensor) -> str:
    """The name of an unusable file: its path, and the key in a shard."""
    key = entry.metadata.get("key")
    path = str(entry.folder / str(entry.metadata.get("file")))
    return path if key is None else f"{path}, {key}"


@contextlib.contextmanager
def progress_bar(
    words: str, total: int, console: Console, unit: str = "tensors"
) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, elsewhere a line every `LINE_S` seconds; yields the function that counts one."""
    if not console.is_terminal:
        num_done = 0

        def advance() -> None:
            nonlocal num_done
            num_done += 1

        def describe(elapsed_s: float) -> str:
            left_s = elapsed_s * (total / num_done - 1) if num_done else None
            left = "" if left_s is None else f", {duration(left_s)} left"
            return f"{words}: {num_done} of {total} {unit} in {duration(elapsed_s)}{left}"

        with _lines(describe, console):
            yield advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape(words), total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def working(words: str, console: Console) -> Iterator[None]:
    """Print a line every `LINE_S` seconds without a terminal, except while a progress bar inside does."""
    if console.is_terminal:
        yield
        return
    with _lines(lambda elapsed_s: f"{words}: {duration(elapsed_s)}", console):
        yield


#: The descriptions that are printed, the innermost last; it alone is.
_nested: list[Callable[[float], str]] = []


@contextlib.contextmanager
def _lines(describe: Callable[[float], str], console: Console) -> Iterator[None]:
    """Print what `describe` says of the seconds so far, every `LINE_S` seconds."""
    start, is_over = time.monotonic(), threading.Event()

    def print_lines() -> None:
        while not is_over.wait(LINE_S):
            if _nested[-1] is describe:
                words = describe(time.monotonic() - start)
                console.print(words, soft_wrap=True, markup=False)

    thread = threading.Thread(target=print_lines, daemon=True)
    _nested.append(describe)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        _nested.remove(describe)


@dataclass(frozen=True)
class Chapter:
    """A chapter, which `draw` calls once for all sources."""

    #: The folder in the output folder, and the name for `--only`.
    folder: str
    #: A short description.
    title: str
    draw: Callable[[Sequence[Source], Desk], list[Path]]

"""The services for chapters: worker processes, a progress bar, output files, a list of unusable files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quantexp.analysis.draw.pool import Pool
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError
from quantexp.runs.status import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = TypeVar("Result")


@dataclass
class Problems:
    """Unusable files; each is reported once, when it is found."""

    complain: Callable[[str], None]
    found: dict[str, str] = field(default_factory=dict)

    def add(self, file: str, why: str) -> None:
        """Report a file."""
        if file not in self.found:
            self.found[file] = why
            self.complain(why if file in why else f"{file}: {why}")


@dataclass(frozen=True)
class ChapterDesk:
    """The `Desk` of one chapter."""

    out: Path
    formats: tuple[str, ...]
    pool: Pool
    problems: Problems
    console: Console

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(f"{self.out.name}: {line}", soft_wrap=True, markup=False)

    def each(
        self, look: Callable[[CapturedTensor], Result], entries: Iterable[CapturedTensor]
    ) -> Iterator[tuple[CapturedTensor, Result]]:
        """As `Desk` says."""
        listed = list(entries)
        with progress_bar(self.out.name, len(listed), self.console) as advance:
            for entry, found in self.pool.each(look, listed):
                advance()
                if isinstance(found, CaptureError | OSError):
                    self.problems.add(place_of(entry), str(found))
                else:
                    yield entry, found

    def save(self, figure: Figure, name: str) -> list[Path]:
        """As `Desk` says."""
        from quantexp.analysis.style import save_figure

        return save_figure(figure, self.out / name, self.formats)

    def write_text(self, name: str, text: str) -> Path:
        """As `Desk` says."""
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
def progress_bar(words: str, total: int, console: Console) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; yields the function that advances it by one tensor."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(escape(words), total=total)
        yield lambda: bar.advance(task)

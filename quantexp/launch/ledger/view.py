"""The table of `quantexp status`: with where each run is or why it ended in a column, or below where that does not fit.

What is shown live must fit a terminal. Where it does not, the completed runs are left out first, then what stands below
the table, then rows from the end, those that run standing first. The summary counts all of them, always.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quantexp.launch.ledger.job import JobState, doing
from quantexp.launch.ledger.rows import MISSING, UNREADABLE, state_word
from quantexp.launch.ledger.standing import Standing
from quantexp.launch.progress import activity, captured_words
from quantexp.runs.find import Missing
from quantexp.runs.status import State
from quantexp.terminal.fitted_table import Column, Fitted, Shrink, fitted_table
from quantexp.terminal.units import duration

#: Where each run is, or why it ended: below the table where it is too narrow for that.
ABOUT = "where, or why it ended"
_COLUMNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("state"),
    Column("iteration", is_number=True),
    Column("loss", is_number=True),
    Column("tokens/s", worth=2, is_number=True),
    Column("left", is_number=True),
    Column(ABOUT, worth=1, shrink=Shrink.WRAP, min_width=60),
)
#: Runs of one reason that are named below the table.
FEW = 4
#: Lines around the rows: heading, shared beginning of the names, count of what is left out, summary.
FRAME = 4
_COLOURS = {
    State.PENDING: "blue",
    State.RUNNING: "cyan",
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.PREEMPTED: "magenta",
    State.CANCELLED: "yellow",
}
#: Where a scheme begins in a run's name.
_SCHEME = re.compile(r"_(?=FA_|linear_|bf16)")


def view(
    found: Sequence[Standing],
    missing: Sequence[Missing],
    console: Console,
    height: int | None = None,
) -> RenderableType:
    """The table and what stands below it, in at most `height` lines."""
    page = _Page(found, missing, console)
    content = page.content(found)
    if height is None or page.lines(content) <= height:
        return content
    going = [each for each in found if each.state is not State.COMPLETED]
    for below in (True, False):
        if page.lines(content := page.content(going, below=below)) <= height:
            return content
    going.sort(key=lambda each: each.state is not State.RUNNING)
    return page.content(going[: max(1, height - FRAME)], below=False)


@dataclass(frozen=True)
class _Page:
    """All of the runs, of which a part is shown."""

    found: Sequence[Standing]
    missing: Sequence[Missing]
    console: Console

    def lines(self, content: RenderableType) -> int:
        return len(self.console.render_lines(content))

    def content(self, shown: Sequence[Standing], *, below: bool = True) -> Group:
        """These runs, and the summary of all."""
        missing = self.missing if below else ()
        names = [each.run.root.name for each in shown]
        fitted, shared = self._table(shown, missing, names), ""
        if fitted.left_out:
            shared = _shared([each.run.root.name for each in self.found])
            names = [name.removeprefix(shared) for name in names]
            fitted = self._table(shown, missing, names)
        parts: list[RenderableType] = [Text(f"{shared}...", style="dim")] * bool(shared)
        parts.append(fitted.table)
        if below and ABOUT in fitted.left_out:
            parts.append(_below(shown, missing, names))
        if below:
            parts += [Text(note, style="yellow") for note in _notes(self.found)]
        elif len(shown) < len(self.found):
            parts.append(Text(f"and {len(self.found) - len(shown)} more", style="dim"))
        return Group(*parts, Text(summary(self.found, self.missing)))

    def _table(
        self, shown: Sequence[Standing], missing: Sequence[Missing], names: list[str]
    ) -> Fitted:
        rows: list[list[str | Text]] = [
            [escape(name), _state(each), *_numbers(each), Text(_about(each))]
            for name, each in zip(names, shown, strict=True)
        ]
        rows += [
            [escape(gone.name), f"[red]{MISSING}[/]", "", "", "", "", Text(gone.reason)]
            for gone in missing
        ]
        return fitted_table(_COLUMNS, rows, self.console.width)


def _shared(names: list[str]) -> str:
    """What all of several names begin with: whole words, and nothing of the scheme's name."""
    if len(names) < 2:
        return ""
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    scheme = _SCHEME.search(names[0])
    longest = "".join(letters[0] for letters in same)[: scheme.end() if scheme else None]
    return longest[: longest.rfind("_") + 1]


def _state(found: Standing) -> str:
    colour = _COLOURS[found.state] if found.state is not None else "red"
    return f"[{colour}]{state_word(found)}[/]"


def _numbers(found: Standing) -> list[str]:
    status, pace = found.status, found.pace
    return [
        f"{status.iteration}/{status.iterations}" if status.iterations else "",
        f"{pace.loss:.4f}" if pace.loss is not None else "",
        f"{pace.tokens_per_s:,.0f}" if pace.tokens_per_s is not None else "",
        duration(pace.time_left_s) if found.state is State.RUNNING else "",
    ]


def _about(found: Standing, where: str | None = None) -> str:
    """Where it is, what it does and has captured, or the first line of why it ended."""
    reason = found.reason.splitlines()[0] if found.reason else ""
    running = found.state is State.RUNNING
    now = (activity(found.status), captured_words(found.status.capture)) if running else ()
    return "; ".join(part for part in (where or found.where, *now, reason) if part)


def _below(
    shown: Sequence[Standing], missing: Sequence[Missing], names: list[str]
) -> RenderableType:
    """Where runs are and why they ended, each once; jobs that wait for the same without their numbers."""
    told: dict[str, list[str]] = {}
    for name, each in zip(names, shown, strict=True):
        waits = each.job is not None and each.job.state in (JobState.PENDING, JobState.REQUEUED)
        where = doing(each.job) if each.job is not None and waits and each.alive else None
        told.setdefault(_about(each, where), []).append(name)
    for gone in missing:
        told.setdefault(gone.reason, []).append(gone.name)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for about, of in told.items():
        if about:
            some = of if len(of) <= FEW else [*of[: FEW - 1], f"and {len(of) - FEW + 1} more"]
            grid.add_row(Text("\n".join(some)), Text(about))
    return Group("", grid, "") if grid.row_count else Group()


def _notes(found: Sequence[Standing]) -> list[str]:
    counted = Counter(each.note for each in found if each.note is not None)
    return [f"{count} of {len(found)}: {note}" for note, count in counted.items()]


def summary(found: Sequence[Standing], missing: Sequence[Missing] = ()) -> str:
    """`20 runs: 2 running, 17 completed, 1 failed`."""
    counted = Counter(each.state for each in found)
    words = [f"{counted[state]} {state.value}" for state in State if counted[state]]
    for count, word in ((counted[None], UNREADABLE), (len(missing), MISSING)):
        words += [f"{count} {word}"] * bool(count)
    total = len(found) + len(missing)
    return f"{total} run{'' if total == 1 else 's'}: {', '.join(words)}" if total else "no runs"

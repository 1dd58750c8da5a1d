"""Shows a sweep in progress: the number of runs in each state, and a line for each running run.

On a terminal both are updated live below the lines of finished runs. Without a terminal there are only lines, one when
a run starts and one when it ends.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from quantexp.launch.outcome import stopping_words
from quantexp.launch.progress import PlainLines, RunLine, captured_size, lines_table
from quantexp.runs.status import State
from quantexp.terminal.escaping import printable
from quantexp.terminal.units import clock
from quantexp_launchers.local.processes import GRACE_S
from quantexp_launchers.local.sweep import Item, Place


class Display:
    """Shows the runs of a sweep; other threads may only call `say`."""

    def __init__(self, items: Sequence[Item], console: Console) -> None:
        self.items, self.console = items, console
        self.lines: dict[int, RunLine] = {}
        self.plain = PlainLines(lambda words: self.say(escape(words)))
        self.summary = Text(no_wrap=True, overflow="ellipsis")
        self.live = Live(
            get_renderable=self._render, console=console, transient=True, refresh_per_second=4
        )
        self._began = time.monotonic()
        self._stopping = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[Display]:
        """Show the runs until the end of this context."""
        self.update(0)
        if self.console.is_terminal:
            self.live.start()
        try:
            yield self
        finally:
            with self._ignore_closed_output():
                self.live.stop()

    @contextlib.contextmanager
    def _ignore_closed_output(self) -> Iterator[None]:
        """Silence the console, instead of ending runs, if its terminal or pipe was closed."""
        try:
            yield
        except OSError:
            self.console.quiet = True

    def say(self, text: str) -> None:
        """Print a permanent line."""
        with self._ignore_closed_output():
            self.console.print(text, soft_wrap=True)

    def bug(self, trace: str) -> None:
        """Print a traceback to standard error."""
        with self._ignore_closed_output():
            sys.stderr.write(printable(trace))

    def started(self, item: Item) -> None:
        """Show that a run has started in a slot."""
        self.lines[id(item)] = RunLine(item.label, item.run)
        if not self.console.is_terminal:
            self.say(f"started    {escape(item.label)}")

    def ended(self, item: Item) -> None:
        """Show that a run has left its slot."""
        del self.lines[id(item)]
        if item.place is Place.DONE:
            self.say(ended_line(item))
        elif not self.console.is_terminal:
            self.say(f"postponed  {escape(item.label)}: another process holds its lock")

    def update(self, num_interrupts: int) -> None:
        """Read the run folders and refresh the display."""
        for line in self.lines.values():
            line.update()
            if not self.console.is_terminal:
                self.plain.update(line, f"{line.name}: ")
        words = summary(self.items)
        if num_interrupts and not self._stopping:
            self._stopping = True
            self.say(stopping_words(GRACE_S))
        if num_interrupts:
            words = f"stopping (Ctrl-C again stops at once): {words}"
        self.summary.plain = f"{words}  {clock(time.monotonic() - self._began)}"

    def _render(self) -> Group:
        """The counts, and a line for each running run."""
        lines = list(self.lines.values())
        return Group(self.summary, *([lines_table(lines, self.console.width)] if lines else []))


def summary(items: Sequence[Item]) -> str:
    """`3 of 10 completed, 1 failed, 2 running, 4 waiting`."""
    completed = sum(item.completed for item in items)
    ended = Counter(i.state.value for i in items if i.place is Place.DONE and not i.completed)
    places = Counter(item.place for item in items)
    parts = [f"{completed} of {len(items)} completed"]
    parts += [f"{count} {state}" for state, count in ended.items()]
    parts += [
        f"{places[place]} {words}"
        for place, words in (
            (Place.RUNNING, "running"),
            (Place.IN_USE, "run by other processes"),
            (Place.WAITING, "waiting"),
        )
        if places[place]
    ]
    return ", ".join(parts)


def ended_line(item: Item) -> str:
    """The outcome of a run in one line."""
    label = escape(item.label)
    if item.outcome is None:
        return f"[red]failed[/]     {label}: {escape(item.reason)}"
    if item.outcome.state is not State.COMPLETED:
        return f"[red]{item.outcome.state.value:10}[/] {label}: {escape(item.outcome.reason)}"
    outcome = item.outcome
    word = "skipped" if outcome.skipped else "completed"
    words = [f"loss {outcome.metrics['loss']:.4f}"] if outcome.metrics else []
    if not outcome.experiment.evaluate.only:
        words.append(captured_size(outcome.tensors, outcome.num_bytes))
    return f"[green]{word:10}[/] {label}: {', '.join(words)}"

"""Progress of a preparation: a live line on a terminal, otherwise a line of text at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

#: Seconds between two lines without a terminal.
INTERVAL_S = 30.0

#: Receives the bytes read of all inputs, the bytes since this start, the documents, and the tokens since this start.
Report = Callable[[int, int, int, int], None]


@contextmanager
def progress(total: int, console: Console) -> Iterator[Report]:
    """Yields a function that reports progress.

    Args:
        total: bytes of all inputs as stored; 0 if unknown.
        console: where progress is shown.
    """
    if console.is_terminal:
        with _live(total, console) as report:
            yield report
    else:
        yield _lines(total, console)


@contextmanager
def _live(total: int, console: Console) -> Iterator[Report]:
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%" if total else "{task.fields[size]}"),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total or None, words="", size="")

        def report(num_read: int, num_new: int, num_documents: int, num_tokens: int) -> None:
            words = _words(num_new, num_documents, num_tokens, time.monotonic() - start)
            bar.update(task, completed=num_read, words=words, size=decimal(num_read))

        yield report


def _lines(total: int, console: Console) -> Report:
    start = last = time.monotonic()

    def report(num_read: int, num_new: int, num_documents: int, num_tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < INTERVAL_S:
            return
        last = now
        words = _words(num_new, num_documents, num_tokens, now - start)
        share = f"{num_read / total:.0%}, " if total else ""
        left = ""
        if total and num_new:
            left = f", {(total - num_read) * (now - start) / num_new / 60:.0f} min left"
        console.print(f"preparing: {share}{words}{left}", soft_wrap=True, markup=False)

    return report


def _words(num_read: int, num_documents: int, num_tokens: int, elapsed_s: float) -> str:
    rate = max(elapsed_s, 1e-3)
    return (
        f"{num_documents:,} documents, {num_tokens / rate:,.0f} tokens/s, "
        f"{decimal(int(num_read / rate))}/s"
    )

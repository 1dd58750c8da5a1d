"""`quantexp status`, `logs` and `cancel`: run status, logs, and cancellation."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from quantexp.cli.arguments import ledger_scope, parser_of
from quantexp.cli.output import print_json
from quantexp.errors import RunError
from quantexp.launch.backend import Standing
from quantexp.launch.ledger.cancel import KILL_AFTER_S, cancel
from quantexp.launch.ledger.standing import settle, standings
from quantexp.launch.ledger.view import status_rows, view
from quantexp.runs.find import Scope, find_run, scope
from quantexp.terminal.console import output_console
from quantexp.terminal.escaping import printable

#: Seconds between two refreshes of `status --watch`.
WATCH_S = 5.0


def run(arguments: argparse.Namespace) -> int:
    """Execute one of the three verbs; returns 0.

    Raises:
        RunError: a DIR that is not a run, or runs that could not be ended.
    """
    root, named = ledger_scope(arguments)
    if arguments.verb == "logs":
        if named is None:
            parser_of("logs").error("logs takes a run: its folder, or a part of its name")
        return show_logs(named, root, arguments.rank, follow=arguments.follow)
    if arguments.verb == "cancel":
        return cancel_runs(named, root, output_console())
    if arguments.json and arguments.watch:
        parser_of("status").error("--json and --watch exclude each other")
    if arguments.json:
        print_json(record(named, root))
        return 0
    return (watch if arguments.watch else show)(named, root, output_console())


def record(word: str | None, root: Path) -> list[dict[str, object]]:
    """The output of `quantexp status --json`."""
    where = scope(word, root)
    return status_rows(_settled(where), where.missing)


def show(word: str | None, root: Path, console: Console) -> int:
    """Print the table of a scope; returns 0."""
    where = scope(word, root)
    rows = _settled(where)
    if not rows and not where.missing:
        console.print(f"no runs in {escape(where.about)}", soft_wrap=True)
    else:
        console.print(view(rows, where.missing, console), crop=False)
    return 0


def watch(word: str | None, root: Path, console: Console) -> int:
    """Show the table of a scope until all its runs have ended, including runs that start later; returns 0."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            where = scope(word, root)
            rows = _settled(where)
            height = console.height - 1 if console.is_terminal else None
            live.update(view(rows, where.missing, console, height), refresh=True)
            if not any(each.alive for each in rows):
                live.update(view(rows, where.missing, console))
                return 0
            time.sleep(WATCH_S)


def show_logs(word: str, root: Path, rank: int, *, follow: bool) -> int:
    """Print a rank's log to standard output; returns 0."""
    from quantexp.launch.ledger.logs import follow_log, show_log

    (follow_log if follow else show_log)(find_run(word, root), rank, _write)
    return 0


def cancel_runs(name: str | None, root: Path, console: Console) -> int:
    """Cancel the live runs of a scope and print the result of each; returns 0."""
    where = scope(name, root)
    rows = _settled(where)
    if alive := sum(each.alive for each in rows):
        runs = "1 run" if alive == 1 else f"{alive} runs"
        console.print(
            f"stopping {runs}; what has not ended after {KILL_AFTER_S:.0f} s is killed",
            soft_wrap=True,
        )
    outcomes = cancel(rows)
    for each in outcomes:
        word = "[yellow]cancelled[/]" if each.done else "[red]not cancelled[/]"
        console.print(f"{word}  {escape(each.run)}: {escape(each.words)}", soft_wrap=True)
    failed = sum(not each.done for each in outcomes)
    if not outcomes:
        console.print(f"no pending or running runs in {escape(where.about)}", soft_wrap=True)
    elif failed:
        raise RunError(f"{failed} of {len(outcomes)} runs could not be cancelled")
    return 0


def _settled(where: Scope) -> list[Standing]:
    return [settle(each) for each in standings(where.runs)]


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()

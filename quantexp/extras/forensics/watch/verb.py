"""`quantexp watch [DIR]`: serves a page that shows the runs of a folder as they run, until Ctrl-C."""

from __future__ import annotations

import argparse
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantexp.cli.arguments import ledger_scope, parser_of
from quantexp.cli.output import complain, print_line
from quantexp.errors import RunError
from quantexp.extras.forensics.watch.folder import FolderWatch
from quantexp.extras.forensics.watch.server import (
    Address,
    PageServer,
    keep_address,
    kept_address,
    page,
)
from quantexp.folders import cache_dir, user_path
from quantexp.launch.ledger.standing import standings
from quantexp.launch.ledger.view import about, status_rows
from quantexp.runs.find import scope
from quantexp.runs.paths import RunDir
from quantexp.terminal.escaping import printable_line

_MOST_PORT = (1 << 16) - 1


def run(arguments: argparse.Namespace) -> int:
    """Print the page's address and serve it; returns only if the server is closed.

    Raises:
        RunError: a DIR that is not a run, or a port that cannot be used.
    """
    port = arguments.port
    if port is not None and not 0 < port <= _MOST_PORT:
        parser_of("watch").error(f"--port must be from 1 to {_MOST_PORT}, got {port}")
    root, named = ledger_scope(arguments)
    if named is not None and _is_empty_folder(user_path(named)):
        root, named = user_path(named).absolute(), None
    server, failure = start(root, named, port), _Failure()
    for line in _lines(server, root if named is None else named):
        print_line(line)
    thread = threading.Thread(target=failure.watched, args=(server,), daemon=True)
    thread.start()
    try:
        server.serve()
    finally:
        server.close()
        server.watch.close()
    if failure.error is not None:
        raise failure.error
    return 0


def start(root: Path, named: str | None, port: int | None) -> PageServer:
    """The server of a scope, which listens and does not answer yet.

    Raises:
        RunError: as `run`.
    """
    where = scope(named, root)
    watched = where.about if named is not None else str(root)
    cache = cache_dir(None)
    address = kept_address(cache, watched)
    folder = where.runs[0].root.parent if where.runs else root
    watch = FolderWatch(lambda: scope(named, root), ledger, folder)
    document = page(printable_line(watched))
    try:
        server = PageServer(port or address.port, address.token, watch, document, _report)
    except RunError:
        if port is not None or not address.port:
            raise
        # another server of this folder has the port of the last time, and keeps it
        return PageServer(0, address.token, watch, document, _report)
    keep_address(cache, watched, Address(address.token, server.port))
    return server


def ledger(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """The rows of `quantexp status --json`, each with what the table of `quantexp status` says about the run."""
    current = standings(runs)
    rows = status_rows(current)
    return [{**row, "about": about(one)} for row, one in zip(rows, current, strict=True)]


def _report(error: Exception) -> None:
    """Name the file of a bug's traceback; the page goes on."""
    from quantexp.cli.unexpected import reported

    complain(reported(error))


class _Failure:
    """An error in the thread that refreshes, which ends the server."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def watched(self, server: PageServer) -> None:
        """Refresh until the server is closed; an unexpected error closes it."""
        try:
            server.watch.run()
        except BaseException as error:  # noqa: BLE001  (raised again by the main thread)
            self.error = error
            server.end()


def _is_empty_folder(path: Path) -> bool:
    """Whether this is a folder where runs may still appear, which is no scope yet."""
    return path.is_dir() and not any(path.iterdir())


def _lines(server: PageServer, what: object) -> list[str]:
    port = server.port
    return [
        f"{printable_line(str(what))}: {server.address}",
        f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {platform.node()}, then the same address",
        "who has the address can read the page; Ctrl-C ends it",
    ]

"""Runs that go on in the background: in a process of its own session, from the snapshot of the source.

The folders are prepared and the sheet is written before; the background process is given the sheet alone. It has no
terminal, so closing one does not reach it. The command returns when the process has the sheet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp.errors import RunError
from quantexp.runs.ranks import log_end
from quantexp.runs.snapshot import environment, take_snapshot
from quantexp_launchers.local.hold_back import hold_back
from quantexp_launchers.local.sheet import Place, Sheet

#: What the background process writes once it has the sheet.
READY = b"ready\n"


def go_on_in_background(sheet: Sheet, console: Console) -> None:
    """Start the background process, and say how to follow and to stop it.

    Raises:
        RunError: it did not start; with its last words.
    """
    sheet.write()
    pid = _start(sheet)
    left = [item for item in sheet.items if item.place is not Place.OVER]
    done = len(sheet.items) - len(left)
    words = "1 run goes" if len(left) == 1 else f"{len(left)} runs go"
    rest = f" ({done} of {len(sheet.items)} are over already)" if done else ""
    console.print(f"{words} on in the background, process {pid}{rest}", soft_wrap=True)
    run = left[0].run
    assert run is not None
    alone = len(sheet.items) == 1
    scope = _shown(run.root if alone else sheet.files.listing)
    for word, what in (
        ("runs", _shown(run.root if alone else sheet.root)),
        ("follow", f"quantexp status {scope}"),
        ("", f"quantexp logs {_shown(run.root)} -f"),
        ("stop", f"quantexp cancel {scope}"),
        ("log", _shown(sheet.files.log)),
    ):
        console.print(f"[bold]{word:8}[/]{escape(what)}", soft_wrap=True)


def _start(sheet: Sheet) -> int:
    """The background process's id, once it has the sheet."""
    read_end, write_end = os.pipe()
    with sheet.files.log.open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quantexp_launchers.local.background"),
                *(str(sheet.files.listing), "--ready-fd", str(write_end)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            start_new_session=True,
            env={**os.environ, **environment(take_snapshot(sheet.root))},
        )
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as ready:
            if ready.readline() == READY:
                process.returncode = 0  # it outlives us: nobody is to wait for it
                return process.pid
    except BaseException:  # the user does not want it any more
        process.terminate()
        process.wait()
        raise
    process.wait()
    for item in sheet.items:
        if item.place is Place.WAITING and item.run is not None:
            hold_back(item.run, "the background process did not start")
    raise RunError(f"the background process did not start; {log_end(sheet.files.log)}")


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

"""Starts a sheet in the background: in a process with its own session, from the source snapshot.

The command prepares the folders and writes the sheet; the background process receives only the sheet. It has no
terminal, so closing one does not affect it. The command returns when the process holds the lock of the sheet.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from rich.console import Console
from rich.markup import escape

from quantexp.errors import RunError
from quantexp.folders import for_shell, short_path
from quantexp.runs.lock import is_held
from quantexp.runs.ranks import log_end
from quantexp.runs.snapshot import environment, take_snapshot
from quantexp.runs.sweep_list import read_sweep
from quantexp_launchers.local.sheet import Place, Sheet

#: Seconds between two looks at the lock.
LOOK_S = 0.05


def go_on_in_background(sheet: Sheet, console: Console) -> None:
    """Start the background process, and print how to follow and stop it.

    Raises:
        RunError: the process did not start; with the end of its log.
    """
    sheet.write()
    pid = _start(sheet)
    unfinished = [item for item in sheet.items if item.place is not Place.DONE]
    num_done = len(sheet.items) - len(unfinished)
    words = "1 run continues" if len(unfinished) == 1 else f"{len(unfinished)} runs continue"
    rest = f" ({num_done} of {len(sheet.items)} are already done)" if num_done else ""
    console.print(f"{words} in the background, process {pid}{rest}", soft_wrap=True)
    run = unfinished[0].run
    assert run is not None
    alone = len(sheet.items) == 1
    scope = for_shell(run.root if alone else sheet.files.listing)
    for label, text in (
        ("runs", short_path(run.root if alone else sheet.root)),
        ("follow", f"quantexp status {scope}"),
        ("", f"quantexp logs {for_shell(run.root)} -f"),
        ("stop", f"quantexp cancel {scope}"),
        ("log", short_path(sheet.files.log)),
    ):
        console.print(f"[bold]{label:8}[/]{escape(str(text))}", soft_wrap=True)


def _start(sheet: Sheet) -> int:
    """Start the background process and return its id once it holds the sheet.

    Raises:
        RunError: the process did not start.
    """
    with sheet.files.log.open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quantexp_launchers.local.background"),
                str(sheet.files.listing),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment(take_snapshot(sheet.root))},
        )
    try:
        while process.poll() is None and not is_held(sheet.files.lock):
            time.sleep(LOOK_S)
    except BaseException:  # the user interrupted the command
        process.terminate()
        process.wait()
        raise
    if process.returncode is None or _is_finished(sheet):
        process.returncode = 0  # it outlives this process, which must not wait for it
        return process.pid
    for item in sheet.items:
        if item.place is Place.WAITING:
            item.hold_back("the background process did not start")
    raise RunError(f"the background process did not start; {log_end(sheet.files.log)}")


def _is_finished(sheet: Sheet) -> bool:
    """Whether a process has held the sheet to its end."""
    with contextlib.suppress(RunError):
        return read_sweep(sheet.files.listing).get("finished") is not None
    return False

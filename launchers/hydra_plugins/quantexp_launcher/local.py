"""Runs a prepared run folder on this machine, as a process of its own, in the foreground.

The folder is all that the process is given. Its output goes to the folder's log; how far it is, the caller reads
from the folder. Ctrl-C reaches the whole process group, so the worker ends itself as cancelled and is waited for.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds between two looks at a running worker.
POLL_S = 0.1
#: Seconds that an interrupted worker has to write its state before it is killed.
GRACE_S = 20.0


def run_worker(
    run_dir: Path, log: Path, on_poll: Callable[[], None], keep_open: tuple[int, ...] = ()
) -> int:
    """Run one worker to its end and return its exit code.

    Args:
        run_dir: a prepared run folder.
        log: where its standard output and error go.
        on_poll: called several times a second while it runs.
        keep_open: file descriptors the worker inherits (the folder's lock outlives us with it).
    """
    command = [sys.executable, "-m", "quantexp.worker", str(run_dir), "--with-parent"]
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=keep_open,
        )
        try:
            while process.poll() is None:
                on_poll()
                time.sleep(POLL_S)
        except BaseException:
            _stop(process)
            raise
        on_poll()
    return process.returncode


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask for an end; insist after a while."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

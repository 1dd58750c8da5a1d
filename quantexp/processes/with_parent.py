"""Runs a command that ends when its parent ends for any reason: `python with_parent.py PARENT COMMAND...`.

The kernel sends SIGTERM when the parent (more exactly: the thread that started this process) ends, also after an exec,
so any program can be started this way, for instance torchrun. Children of that program find their parent's process id
in QUANTEXP_PARENT. This works only on Linux; elsewhere it has no effect. The module imports only the standard library,
so that it starts by its path in a few milliseconds.

`leave_if_stuck` ends a process on a signal even if its main thread is inside a long operation. Python calls a
signal handler between two instructions of the main thread. A matrix product, a collective or the read of a large file
is one instruction, and may last for minutes. Python writes the signal to a pipe immediately (`signal.set_wakeup_fd`). A
thread reads the pipe, waits `PATIENCE_S` for the handler, and then ends the process. It cannot run while the operation
holds the GIL, which torch operations do not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping

#: The environment variable with the process id of the parent.
PARENT = "QUANTEXP_PARENT"
#: The environment variable with the process id of the `quantexp` that started a run, above torchrun if there is one.
COMMAND = "QUANTEXP_COMMAND"
#: Seconds until a killed process has ended.
DEATH_S = 0.5
#: prctl(2): sets the signal that this process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None) -> None:
    """Make the kernel send SIGTERM to this process when its parent dies, or at once if it is already dead."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent is not None and os.getppid() != parent and not _lives(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def parent_from(environment: Mapping[str, str]) -> int | None:
    """The process id in QUANTEXP_PARENT."""
    value = environment.get(PARENT)
    return int(value) if value else None


def ended_command(environment: Mapping[str, str]) -> int | None:
    """The process id in QUANTEXP_COMMAND if that process has ended; None if it is running, or not known.

    The kernel reports the death of the thread that started this process, a moment before the other threads have ended.
    """
    value = environment.get(COMMAND)
    if sys.platform != "linux" or value is None:
        return None
    until = time.monotonic() + DEATH_S
    while _lives(int(value)):
        if time.monotonic() > until:
            return None
        time.sleep(DEATH_S / 20)
    return int(value)


def _lives(pid: int) -> bool:
    """Whether the process is running; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:  # noqa: PTH123  (pathlib takes longer to import than all else here)
            state = stream.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def main(arguments: list[str]) -> None:
    """Replace this process by the command."""
    parent, *command = arguments
    end_with_parent(int(parent))
    os.environ[PARENT] = str(os.getpid())
    os.execv(command[0], command)


#: Seconds that the main thread has to handle a signal.
PATIENCE_S = 3.0


def leave_if_stuck(
    signals: Collection[int], is_taken: Callable[[], bool], leave: Callable[[], object]
) -> None:
    """From now on, call `leave` in another thread if the main thread does not handle one of these signals in time.

    Args:
        signals: signals with Python handlers.
        is_taken: returns whether a handler has run.
        leave: ends the process.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read_end, 1)[0] not in signals:
            pass
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if is_taken():
                return
            time.sleep(PATIENCE_S / 30)
        leave()

    threading.Thread(target=watch, name="signals", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])

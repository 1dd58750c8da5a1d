"""Runs work in a child of this process, which watches it from outside and ends as the child ends.

The child is a fork, so the work needs no command of its own and keeps this process's group and open files. Signals that
end a process reach the child; it also ends when this process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from quantexp.processes.with_parent import end_with_parent

#: Seconds between two looks at the child.
POLL_S = 0.2
#: Signals that are passed on.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_in_child(work: Callable[[], int], look: Callable[[int], Callable[[], None]]) -> int:
    """Run the work in a child and return its exit code, negative for a signal (as `subprocess`).

    Args:
        work: returns the exit code; called while this process has only one thread.
        look: gets the child's process id and returns what is called several times a second meanwhile; an exception of
            that ends the waiting, and is raised here. It has to end the child (`end_child`).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until they can be passed on
    child = os.fork()
    if child == 0:
        _become(work, parent, blocked)
    handlers = {number: signal.getsignal(number) for number in _FORWARDED}

    def forward(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        watch = look(child)
        while (status := _ended(child)) is None:
            watch()
            time.sleep(POLL_S)
        return os.waitstatus_to_exitcode(status)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _become(work: Callable[[], int], parent: int, mask: set[int]) -> None:
    """Do the work in the child under this signal mask, and leave."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # here, as a handler may raise
        end_with_parent(parent)
        code = work()
    except BaseException:  # noqa: BLE001  (no code of the parent may run in the child)
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _ended(child: int) -> int | None:
    """The child's wait status; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def end_child(child: int, grace_s: float) -> None:
    """Ask a child to end, also a stopped one, and kill it after the grace period; its status stays to be read."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(child, number)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(POLL_S)
    os.kill(child, signal.SIGKILL)


def end_like(code: int) -> int:
    """The exit code for this process; ends it by the same signal if one ended the child."""
    if code < 0:
        if code != -signal.SIGKILL:  # which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(POLL_S)
    return code if code >= 0 else 128 - code

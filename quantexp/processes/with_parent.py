"""A process that ends with the one that started it, however that one ended: `python with_parent.py PARENT COMMAND...`.

The kernel is asked to send SIGTERM when the parent (more exactly: the thread that started us) is gone, which holds
through an exec; so any program can be started this way, torchrun for one. What that program starts finds its own
parent's process id in QUANTEXP_PARENT. Linux only; elsewhere a process is left alone. It imports nothing but the
standard library, so that starting it by its path takes a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

#: The process id of the process that this one is to end with.
PARENT = "QUANTEXP_PARENT"
#: prctl(2): the signal this process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None) -> None:
    """Have SIGTERM sent to this process when its parent dies, or at once where the parent has died already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent is not None and os.getppid() != parent and not _lives(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def parent_from(environment: Mapping[str, str]) -> int | None:
    """The process id in QUANTEXP_PARENT."""
    given = environment.get(PARENT)
    return int(given) if given else None


def _lives(pid: int) -> bool:
    """Whether the process runs: one that ended, and that its own parent has not yet asked about, does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:  # noqa: PTH123  (pathlib takes longer to import than all else here)
            state = stream.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def main(words: list[str]) -> None:
    """Become the command."""
    parent, *command = words
    end_with_parent(int(parent))
    os.environ[PARENT] = str(os.getpid())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

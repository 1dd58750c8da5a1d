"""Threads: torch's own, for work whose tensors are small, and those that work beside training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from quantexp.processes.cores import allowed_cores

#: How much lower than its starter's the priority of a thread beside training is, on Linux.
NICE = 10


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch on so many threads, at most as many as before.

    Many operations on small tensors are no faster on several threads, and on cores that are busy with something else
    up to a hundred times slower, because the threads wait for each other at the end of every one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leaves_a_core() -> bool:
    """Whether training on the CPU leaves a core to other threads: its own, and those of the run's processes here.

    Where it has all of them, each thread beside it keeps one of its threads from its core, and at the end of every
    operation all others wait for that one: the work costs training its whole time, and shared out among training's own
    threads only its share of it.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
    return torch.get_num_threads() * here < len(allowed_cores())


def started_beside(work: Callable[[], object], name: str) -> threading.Thread:
    """A thread that has what training leaves of the processors, and whose torch operations it does alone.

    Every thread that shares out an operation has helpers of its own. With more of them than cores the C library's
    OpenMP no longer lets any wait for the next operation on its core, training's included: each step then takes a
    tenth longer or more, also those during which this thread rests (libgomp, `GOMP_SPINCOUNT`). It is a daemon: a
    process that is to end does not wait for it.
    """
    number, is_alone = torch.get_num_threads(), threading.Event()

    def run() -> None:
        # Asked once, torch does not look again at what new threads are given.
        torch.get_num_threads()
        torch.set_num_threads(1)
        is_alone.set()
        _yield_to_others()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    is_alone.wait()
    # What was set last, in whichever thread, is what new threads are given.
    torch.set_num_threads(number)
    return thread


def _yield_to_others() -> None:
    """Let this thread have what others leave; where that cannot be had, it is one among equals."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)

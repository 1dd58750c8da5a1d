"""Threads: the number of torch's threads, and low-priority background threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch

#: The nice increment of a background thread, on Linux.
NICE = 10


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Limit torch to this number of threads inside the context.

    Many operations on small tensors are no faster with several threads, and up to a hundred times slower on busy cores,
    because the threads synchronise at the end of every operation.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def started_beside(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a low-priority background thread with single-threaded torch operations.

    Every thread that runs a parallel operation gets its own OpenMP helpers. With more helpers than cores, libgomp stops
    spin-waiting for all threads, including training's: each step takes at least a tenth longer, even while this thread
    is idle (libgomp, `GOMP_SPINCOUNT`). The thread is a daemon, so it does not delay the end of the process.
    """
    number, is_alone = torch.get_num_threads(), threading.Event()

    def run() -> None:
        # After the first query in a thread, torch does not read the default for new threads again.
        torch.get_num_threads()
        torch.set_num_threads(1)
        is_alone.set()
        _yield_to_others()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    is_alone.wait()
    # The last value set in any thread is the default for new threads.
    torch.set_num_threads(number)
    return thread


def _yield_to_others() -> None:
    """Lower this thread's priority; it keeps its priority if the system does not support that."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)

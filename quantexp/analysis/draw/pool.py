"""Processes many tensors in worker processes with one torch thread each.

Workers are started by a server process of their own (forkserver): a copy of a process whose torch has threads may wait
for them forever. They end with the process that started them. Work is handed out a few pieces ahead, so that a
collection of any length takes no memory, and results come in its order. A piece that fails for what is in a file is
given back as the error; a worker that dies is an error of the whole.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from quantexp.analysis.draw.server import context
from quantexp.errors import CaptureError
from quantexp.processes.threads import threads
from quantexp.processes.with_parent import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Pieces of work queued ahead for each process.
_AHEAD = 3


class Pool:
    """A pool of worker processes, started on first use; with one job, this process does the work itself."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._executor: ProcessPoolExecutor | None = None

    def each(
        self, look: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | CaptureError | OSError]]:
        """`look(item)` or its error for each item, in order.

        Raises:
            CaptureError: a worker died.
        """
        if self.jobs == 1:
            yield from _in_this_process(look, items)
            return
        executor = self._started()
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, executor.submit(look, item)))
                if len(waiting) > self.jobs * _AHEAD:
                    first, future = waiting.popleft()
                    yield first, _outcome(future)
            while waiting:
                first, future = waiting.popleft()
                yield first, _outcome(future)
        except BrokenProcessPool as error:
            self._executor = None
            raise CaptureError(
                "a worker process died, out of memory perhaps; the same command goes on where this one stopped: try "
                "it with --jobs 1"
            ) from error
        finally:
            for _, future in waiting:
                future.cancel()

    def close(self) -> None:
        """Stop the workers after their current work; pending work is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(self.jobs, context(), _begin)
        return self._executor


def cores() -> int:
    """The cores that this process may use, ascending."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """Initialise a worker: it ignores Ctrl-C, which its parent handles."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(None)
    torch.set_num_threads(1)


def _in_this_process(
    look: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result | CaptureError | OSError]]:
    for item in items:
        with threads(1):
            try:
                found: Result | CaptureError | OSError = look(item)
            except (CaptureError, OSError) as error:
                found = error
        yield item, found


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result()
    except (CaptureError, OSError) as error:
        return error

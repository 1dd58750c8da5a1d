"""Processes many tensors in worker processes with one torch thread each.

A fork server starts the workers and imports their modules once: a copy of this process, whose torch has threads, may
wait for those threads forever. Workers end with the process that started them. Only a few pieces of work are submitted
ahead, so that a collection of any length takes no memory, and results come in order.

A piece whose file cannot be used yields the error in its place. When a worker dies, the executor loses all pieces in
flight. Each of them is repeated in a process of its own, so that only the piece that ends its worker fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import TypeVar

from quantexp.errors import CaptureError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Pieces of work queued ahead for each process.
_AHEAD = 3
#: Modules for every worker, and additional modules for workers that draw.
_COUNTS = ["quantexp.analysis.draw.work"]
_DRAWS = ["quantexp.analysis.draw.distribution", "quantexp.analysis.draw.heatmap"]


class Pool:
    """A pool of worker processes, started on first use; with one job, this process does the work itself."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._executor: ProcessPoolExecutor | None = None

    def each(
        self, look: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | CaptureError | OSError]]:
        """`look(item)`, or its error, for each item in order."""
        if self.jobs == 1:
            yield from _in_this_process(look, items)
            return
        pending: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                pending.append((item, self._submit(look, item)))
                if len(pending) > self.jobs * _AHEAD:
                    first, future = pending.popleft()
                    outcome = _outcome(look, first, future)
                    yield first, outcome
            while pending:
                first, future = pending.popleft()
                outcome = _outcome(look, first, future)
                yield first, outcome
        finally:
            for _, future in pending:
                future.cancel()

    def close(self) -> None:
        """Stop the workers after their current work; pending work is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _submit(self, look: Callable[[Item], Result], item: Item) -> Future[Result]:
        try:
            if self._executor is not None:
                return self._executor.submit(look, item)
        except BrokenProcessPool:
            pass  # a worker has died since
        self._executor = _started(self.jobs)
        return self._executor.submit(look, item)


def start_server(*, draws: bool = True) -> None:
    """Start the fork server, so that it imports in parallel with this process; otherwise the first worker starts it."""
    _context(draws=draws)
    ensure_running()


def _context(*, draws: bool = True) -> ForkServerContext:
    """The multiprocessing context of the workers; `draws` only matters before the server starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_COUNTS, *(_DRAWS if draws else [])])
    return context


def _started(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, _context(), _begin)


def _begin() -> None:
    """Initialise a worker: it ignores Ctrl-C, which its parent handles."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_creator, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_creator() -> None:
    """End this worker with the process that created the pool; its parent, the fork server, would outlive that one."""
    creator = multiprocessing.parent_process()
    assert creator is not None
    wait([creator.sentinel])
    os._exit(1)


def _in_this_process(
    look: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result | CaptureError | OSError]]:
    from quantexp.processes.threads import (
        threads,
    )  # imports torch, which the command imports in parallel

    for item in items:
        with threads(1):
            try:
                result: Result | CaptureError | OSError = look(item)
            except (CaptureError, OSError) as error:
                result = error
        yield item, result


def _outcome(
    look: Callable[[Item], Result], item: Item, future: Future[Result]
) -> Result | CaptureError | OSError:
    try:
        return future.result()
    except BrokenProcessPool:
        return _alone(look, item)
    except (CaptureError, OSError) as error:
        return error


def _alone(look: Callable[[Item], Result], item: Item) -> Result | CaptureError | OSError:
    """Repeat a piece of work in a process of its own."""
    with _started(1) as executor:
        try:
            return executor.submit(look, item).result()
        except BrokenProcessPool:
            return CaptureError(
                "a worker process died with it, out of memory perhaps; the same command draws what is missing: try it "
                "with --jobs 1"
            )
        except (CaptureError, OSError) as error:
            return error

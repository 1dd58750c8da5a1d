"""A low-priority background thread that works on batches in order, and a limit of the bytes that wait for it.

Bytes are reserved when a tensor is taken, and released when the batch with the tensor is done. `reserve` blocks while
the total would exceed the limit, unless nothing is reserved, so a single tensor of any size passes. The queue measures
how long callers were blocked. The first error stops the work: later batches are dropped, and the next call raises the
error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from quantexp.processes.threads import started_beside

Batch = TypeVar("Batch")


class WorkQueue(Generic[Batch]):
    """Batches that wait for the background thread."""

    def __init__(self, most_bytes: int, work: Callable[[Batch], object]) -> None:
        """`work` runs in the background thread, on one batch after the other."""
        self.most_bytes, self._work = most_bytes, work
        #: Reserved bytes, and their maximum so far.
        self.num_bytes = 0
        self.peak_bytes = 0
        #: Seconds that callers of `reserve` were blocked.
        self.waited_s = 0.0
        #: Pending batches with their bytes; the first one may be in work.
        self._batches: deque[tuple[Batch, int]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many bytes fit without blocking."""
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.most_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes for a later batch; blocks until there is room, so all earlier reservations must be put first.

        Raises:
            BaseException: the error of earlier work.
        """
        start = time.perf_counter()
        with self._changed:
            self._wait_for(lambda: self.has_room(num_bytes))
            self.waited_s += time.perf_counter() - start
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def put(self, batch: Batch, num_bytes: int = 0) -> None:
        """Queue a batch whose bytes are reserved.

        Raises:
            BaseException: the error of earlier work.
        """
        with self._changed:
            self._raise()
            self._batches.append((batch, num_bytes))
            self._changed.notify_all()
            if self._thread is None:
                # A daemon thread: only `flush` waits for a disk that hangs.
                self._thread = started_beside(self._run, "capture")

    def flush(self) -> None:
        """Wait until all batches are done.

        Raises:
            BaseException: the error of earlier work.
        """
        with self._changed:
            self._wait_for(lambda: not self._batches)

    def close(self) -> None:
        """End the thread after the queued batches are done or have failed; ignores errors."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or is_done())
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._has_more():
            batch, num_bytes = self._batches[0]
            error: BaseException | None = None
            try:
                self._work(batch)
            except BaseException as one:  # noqa: BLE001  (raised by the next call)
                error = one
            del batch  # its memory is free when its bytes are
            with self._changed:
                self._batches.popleft()
                self.num_bytes -= num_bytes
                self._error = error
                if error is not None:
                    self.num_bytes -= sum(dropped for _, dropped in self._batches)
                    self._batches.clear()
                self._changed.notify_all()

    def _has_more(self) -> bool:
        """Wait for a batch; false at the end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._batches) or self._closed)
            return bool(self._batches) and self._error is None

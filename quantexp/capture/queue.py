"""A bounded queue of work for one background thread, in order.

What is queued counts by its bytes. `put` waits while they would be more than the limit, unless nothing else is queued:
a single piece of any size goes through. How long it waited is counted, so that back-pressure shows. The first error
ends the work: what is queued after it is dropped, and whoever calls next gets the error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

#: How much lower than the caller's the thread's priority is, on Linux.
NICE = 10


@dataclass(frozen=True)
class _Piece:
    work: Callable[[], None]
    num_bytes: int


class WorkQueue:
    """Work done in the background, in the order in which it came."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        #: Bytes that wait or are being worked on, and the most there ever were.
        self.num_bytes = 0
        self.peak_bytes = 0
        #: Seconds that callers waited for room, and that the thread worked.
        self.waited_s = 0.0
        self.worked_s = 0.0
        self._pieces: deque[_Piece] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._idle = True
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None], num_bytes: int = 0) -> None:
        """Queue work; waits for room.

        Raises:
            BaseException: whatever earlier work raised.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(num_bytes) or self._error is not None)
            self.waited_s += time.perf_counter() - start
            self._raise()
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
            self._pieces.append(_Piece(work, num_bytes))
            if self._thread is None:
                # A daemon: a process that is to end does not wait for a disk that hangs, unless `flush` is called.
                self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is done.

        Raises:
            BaseException: whatever earlier work raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._done())
            self._raise()

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until what is queued has brought something about.

        Raises:
            BaseException: whatever earlier work raised.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_done())
            self.waited_s += time.perf_counter() - start
            self._raise()

    def close(self) -> None:
        """End the thread, once what is queued is done or has failed; says nothing of errors."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _has_room(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.most_bytes

    def _done(self) -> bool:
        return not self._pieces and self._idle

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        _yield_to_others()
        while (piece := self._next()) is not None:
            start = time.perf_counter()
            try:
                piece.work()
            except BaseException as error:  # noqa: BLE001  (raised where the next piece is put)
                with self._changed:
                    self._error = error
                    self._pieces.clear()
            with self._changed:
                self.worked_s += time.perf_counter() - start
                self.num_bytes -= piece.num_bytes
                self._idle = True
                self._changed.notify_all()

    def _next(self) -> _Piece | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces) or self._closed)
            if not self._pieces:
                return None
            self._idle = False
            return self._pieces.popleft()


def _yield_to_others() -> None:
    """Let this thread have what others leave of the processors; where that cannot be had, it is one among equals."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)

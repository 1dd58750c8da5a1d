"""A bounded FIFO queue for two background threads: one computes, one writes to disk.

A piece has work for the first thread and an optional follower for the second; both threads keep the order. If there is
no core for the first thread, the caller does its work. Followers that became ready while the disk was busy are passed
on together.

A piece counts with its bytes until both threads are done with it. `put` blocks while the total would exceed the limit,
unless the queue is empty, so a single piece of any size passes. The queue measures how long callers were blocked. The
first error stops the work: later pieces are dropped, and the next call raises the error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from quantexp.processes.threads import started_beside

#: Maximum bytes of followers that are passed on together; larger batches are no faster.
_TOGETHER_BYTES = 1 << 24

Follower = TypeVar("Follower")


@dataclass(frozen=True)
class _Piece(Generic[Follower]):
    work: Callable[[], object]
    then: Follower | None
    num_bytes: int


class WorkQueue(Generic[Follower]):
    """A queue of background work, in order."""

    def __init__(
        self,
        most_bytes: int,
        follow: Callable[[Sequence[Follower]], None],
        works_beside: bool = True,
    ) -> None:
        """`follow` runs in the second thread, on the followers of one or several pieces, in order.

        Without `works_beside` there is no first thread: the caller of `put` does the work, and gets its error.
        """
        self.most_bytes, self._follow, self._works_beside = most_bytes, follow, works_beside
        #: Bytes in the queue, and their maximum so far.
        self.num_bytes = 0
        self.peak_bytes = 0
        #: Seconds that callers were blocked, and seconds spent in `follow`.
        self.waited_s = 0.0
        self.followed_s = 0.0
        #: Pieces pending for the first thread, and for the second.
        self._pieces: deque[_Piece[Follower]] = deque()
        self._worked: deque[_Piece[Follower]] = deque()
        self._unfinished = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def put(
        self,
        work: Callable[[], object],
        num_bytes: int = 0,
        then: Follower | None = None,
    ) -> None:
        """Queue work and its follower; blocks until there is room.

        Raises:
            BaseException: the error of earlier work.
        """
        self.reserve(num_bytes)
        self.put_reserved(work, num_bytes, then)

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many bytes fit without blocking."""
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.most_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes for later work; blocks until there is room, so all earlier reservations must be used first.

        Raises:
            BaseException: the error of earlier work.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self.has_room(num_bytes) or self._error is not None)
            self.waited_s += time.perf_counter() - start
            self._raise()
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def put_reserved(
        self, work: Callable[[], object], num_bytes: int, then: Follower | None = None
    ) -> None:
        """Queue work whose bytes are already reserved.

        Raises:
            BaseException: the error of earlier work.
        """
        piece = _Piece(work, then, num_bytes)
        with self._changed:
            self._raise()
            self._unfinished += 1
            self._start()
            if self._works_beside:
                self._pieces.append(piece)
                self._changed.notify_all()
        if not self._works_beside:
            self._work_here(piece)

    def then(self, follower: Follower) -> None:
        """Queue a follower without work, after all earlier pieces.

        Raises:
            BaseException: the error of earlier work.
        """
        self.put(_nothing, then=follower)

    def flush(self) -> None:
        """Wait until the queue is empty.

        Raises:
            BaseException: the error of earlier work.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._unfinished)
            self._raise()

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until queued work has made `is_done` true.

        Raises:
            BaseException: the error of earlier work.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_done())
            self.waited_s += time.perf_counter() - start
            self._raise()

    def close(self) -> None:
        """End the threads after the queued work is done or has failed; ignores errors."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._threads:
            return
        # Daemon threads: only `flush` waits for a disk that hangs.
        if self._works_beside:
            self._threads.append(started_beside(self._work, "capture"))
        self._threads.append(started_beside(self._work_after, "capture-disk"))

    def _work(self) -> None:
        while (piece := self._next(self._pieces)) is not None:
            self._pass_on(piece, is_done=self._succeeds(piece.work))

    def _work_here(self, piece: _Piece[Follower]) -> None:
        is_done = False
        try:
            piece.work()
            is_done = True
        finally:
            self._pass_on(piece, is_done)

    def _pass_on(self, piece: _Piece[Follower], is_done: bool) -> None:
        """Pass a piece to the second thread if it has a follower."""
        with self._changed:
            if is_done and piece.then is not None and self._error is None:
                self._worked.append(piece)
            else:
                self._end(piece)
            self._changed.notify_all()

    def _work_after(self) -> None:
        while (piece := self._next(self._worked)) is not None:
            start = time.perf_counter()
            pieces = self._with_more(piece)
            followers = [one.then for one in pieces if one.then is not None]
            self._succeeds(partial(self._follow, followers))
            with self._changed:
                self.followed_s += time.perf_counter() - start
                for one in pieces:
                    self._end(one)
                self._changed.notify_all()

    def _end(self, piece: _Piece[Follower]) -> None:
        self.num_bytes -= piece.num_bytes
        self._unfinished -= 1

    def _succeeds(self, work: Callable[[], object]) -> bool:
        """Run work and return whether it succeeded; after an error nothing follows."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised by the next call)
            with self._changed:
                self._error = self._error or error
                for queued in (self._pieces, self._worked):
                    queued.clear()
        return self._error is None

    def _next(self, queued: deque[_Piece[Follower]]) -> _Piece[Follower] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(queued) or self._is_over(queued))
            return queued.popleft() if queued else None

    def _with_more(self, piece: _Piece[Follower]) -> list[_Piece[Follower]]:
        """A piece and the finished pieces behind it."""
        with self._changed:
            pieces, num_bytes = [piece], piece.num_bytes
            while self._worked and num_bytes + self._worked[0].num_bytes <= _TOGETHER_BYTES:
                pieces.append(self._worked.popleft())
                num_bytes += pieces[-1].num_bytes
            return pieces

    def _is_over(self, queued: deque[_Piece[Follower]]) -> bool:
        """Whether no piece will come: the second thread may still get one while the first has work."""
        is_last = queued is self._worked
        return self._closed and (not is_last or not self._unfinished or self._error is not None)


def _nothing() -> None:
    """The work of a piece with only a follower."""

"""A bounded queue of work for two background threads, in order: one that computes, one that waits for the disk.

A piece is work for the first thread and something that follows it for the second, each in the order in which the pieces
came. Where no core is left to the first thread, the caller does its work. What has been worked on while the disk was
busy follows together.
What is queued counts by its bytes until both are done. `put` waits while they would be more than the limit, unless
nothing else is queued: a single piece of any size goes through. How long it waited is counted, so that back-pressure
shows. The first error ends the work: what is queued after it is dropped, and whoever calls next gets the error.
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

#: Bytes of pieces that follow together: with more the disk is no quicker.
_TOGETHER_BYTES = 1 << 24

Follower = TypeVar("Follower")


@dataclass(frozen=True)
class _Piece(Generic[Follower]):
    work: Callable[[], object]
    then: Follower | None
    num_bytes: int


class WorkQueue(Generic[Follower]):
    """Work done in the background, in the order in which it came."""

    def __init__(
        self,
        most_bytes: int,
        follow: Callable[[Sequence[Follower]], None],
        works_beside: bool = True,
    ) -> None:
        """`follow` is the second thread's: it is given what follows one piece or several, in order.

        Unless it `works_beside`, there is no first thread: whoever puts a piece does its work, and gets its error.
        """
        self.most_bytes, self._follow, self._works_beside = most_bytes, follow, works_beside
        #: Bytes that wait or are being worked on, and the most there ever were.
        self.num_bytes = 0
        self.peak_bytes = 0
        #: Seconds that callers waited for room, and that what follows the work took.
        self.waited_s = 0.0
        self.followed_s = 0.0
        #: Pieces that wait for the first thread, and for the second.
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
        """Queue work and what follows it; waits for room.

        Raises:
            BaseException: whatever earlier work raised.
        """
        self.reserve(num_bytes)
        self.put_reserved(work, num_bytes, then)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes need not wait."""
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.most_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count bytes from now on, of work that is put later; waits for room, so all reserved before must be put.

        Raises:
            BaseException: whatever earlier work raised.
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
        """Queue work whose bytes are counted already.

        Raises:
            BaseException: whatever earlier work raised.
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
        """Queue what is to follow all that was put before.

        Raises:
            BaseException: whatever earlier work raised.
        """
        self.put(_nothing, then=follower)

    def flush(self) -> None:
        """Wait until all is done.

        Raises:
            BaseException: whatever earlier work raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._unfinished)
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
        """End the threads, once what is queued is done or has failed; says nothing of errors."""
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
        # Nothing waits for a disk that hangs, unless `flush` is called.
        if self._works_beside:
            self._threads.append(started_beside(self._work, "capture"))
        self._threads.append(started_beside(self._work_after, "capture-disk"))

    def _work(self) -> None:
        while (piece := self._next(self._pieces)) is not None:
            self._pass_on(piece, is_done=self._does(piece.work))

    def _work_here(self, piece: _Piece[Follower]) -> None:
        is_done = False
        try:
            piece.work()
            is_done = True
        finally:
            self._pass_on(piece, is_done)

    def _pass_on(self, piece: _Piece[Follower], is_done: bool) -> None:
        """To the second thread, if anything is to follow."""
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
            self._does(partial(self._follow, followers))
            with self._changed:
                self.followed_s += time.perf_counter() - start
                for one in pieces:
                    self._end(one)
                self._changed.notify_all()

    def _end(self, piece: _Piece[Follower]) -> None:
        self.num_bytes -= piece.num_bytes
        self._unfinished -= 1

    def _does(self, work: Callable[[], object]) -> bool:
        """Whether it went well; nothing follows an error."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised where the next piece is put)
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
        """A piece and those behind it that have been worked on."""
        with self._changed:
            pieces, num_bytes = [piece], piece.num_bytes
            while self._worked and num_bytes + self._worked[0].num_bytes <= _TOGETHER_BYTES:
                pieces.append(self._worked.popleft())
                num_bytes += pieces[-1].num_bytes
            return pieces

    def _is_over(self, queued: deque[_Piece[Follower]]) -> bool:
        """Whether nothing will come: the second thread may get something as long as the first has work."""
        is_last = queued is self._worked
        return self._closed and (not is_last or not self._unfinished or self._error is not None)


def _nothing() -> None:
    """The work of a piece that only follows others."""

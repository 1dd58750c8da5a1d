"""Pending tensors: their copies in host memory, a background thread that writes batches of them, a limit of the bytes.

The thread works on batches in order. Bytes are reserved when a tensor is taken, and released when the batch with the
tensor is done. `reserve` blocks while the total would exceed the limit, unless nothing is reserved, so a single tensor
of any size passes. The queue measures how long callers were blocked. The first error stops the work: later batches are
dropped, and the next call raises the error.

A copy does not block the training step. From a GPU it goes to pinned memory on a side stream: training continues, and
a reader of the values waits only for the copy. Until it ends the tensor is referenced, so that its memory is not
reused and autograd does not add another gradient into it; whoever else changes it calls `wait_for_copies` before. On a
CPU the memory of earlier copies is used again: fresh memory takes several times as long as filling it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quantexp.processes.threads import started_beside

Batch = TypeVar("Batch")


class WorkQueue(Generic[Batch]):
    """Batches that wait for the background thread."""

    def __init__(
        self, most_bytes: int, work: Callable[[Batch], object], name: str = "capture"
    ) -> None:
        """`work` runs in the background thread of this name, on one batch after the other."""
        self.most_bytes, self._work, self._name = most_bytes, work, name
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

    @property
    def is_idle(self) -> bool:
        """Whether all batches are done."""
        return not self._batches

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
                self._thread = started_beside(self._run, self._name)

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


class HostMemory:
    """Memory for copies on a CPU: at most `most_bytes` in use and free, unless more is in use."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        #: Bytes in use and free.
        self.num_bytes = 0
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """A contiguous tensor of this dtype and shape, not initialised."""
        with self._lock:
            if same := self._free.get((like.dtype, like.shape)):
                return same.pop()
            self.num_bytes += like.nbytes
            self._shrink()
        return torch.empty(like.shape, dtype=like.dtype)

    def give_back(self, memory: Tensor) -> None:
        """Return a tensor that is no longer used; memory of a GPU's copy is torch's own."""
        if not memory.is_pinned():
            with self._lock:
                self._free.setdefault((memory.dtype, memory.shape), []).append(memory)
                self._shrink()

    def let_go(self) -> None:
        """Free all memory, as soon as it is given back."""
        with self._lock:
            self.most_bytes = 0
            self._shrink()

    def _shrink(self) -> None:
        while self.num_bytes > self.most_bytes and self._free:
            key, same = next(iter(self._free.items()))
            if same:
                self.num_bytes -= same.pop().nbytes
            else:
                del self._free[key]


def host_copy(x: Tensor, memory: HostMemory) -> Callable[[], Tensor]:
    """Start a copy; the function waits for it and returns the contiguous host tensor."""
    x = x.detach()
    if x.device.type == "cuda":
        return _from_gpu(x)
    copied = memory.take(x).copy_(x)
    return lambda: copied


def _from_gpu(x: Tensor) -> Callable[[], Tensor]:
    side, device = _side_of(x.device), x.device
    side.stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side.stream):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        copied_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied_event.record(side.stream)
    while side.running and side.running[0][0].query():  # type: ignore[no-untyped-call]
        side.running.popleft()
    side.running.append((copied_event, x))

    def wait() -> Tensor:
        with torch.cuda.device(
            device
        ):  # in another thread this is device 0, which would get a context of this process
            copied_event.synchronize()
        return host

    return wait


def wait_for_copies(device: torch.device) -> None:
    """Let what this thread computes next on a GPU wait for all copies that have begun; on a CPU they are complete."""
    if device.type == "cuda":
        side = _side_of(device)
        torch.cuda.current_stream(device).wait_stream(side.stream)
        side.running.clear()


@dataclass(frozen=True)
class _Side:
    """The stream that copies from one GPU."""

    stream: torch.cuda.Stream
    #: Copies that may still run, in order: what ends with each, and the tensor that it reads.
    running: deque[tuple[torch.cuda.Event, Tensor]] = field(default_factory=deque)


@cache
def _side_of(device: torch.device) -> _Side:
    return _Side(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

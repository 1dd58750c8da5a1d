"""Copies a tensor to host memory without blocking the training step.

From a GPU, the copy goes to pinned memory on a side stream: training continues, a reader of the values waits only for
the copy, and the tensor's memory is not reused before it ends. On a CPU it is a plain copy into recycled memory,
because allocating fresh memory takes several times as long as filling it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantexp.capture.store.direct import address_of, aligned

#: Smaller copies use the allocator, which has such memory at hand.
_LEAST_BYTES = 1 << 16
#: Larger copies are worth the synchronisation of torch's threads: two threads copy twice as fast.
_SHARED_BYTES = 1 << 21


@dataclass(frozen=True)
class HostCopy:
    """A copy in progress."""

    #: Waits for the copy and returns the contiguous host tensor.
    wait: Callable[[], Tensor]
    #: Releases the memory; call it when the tensor is no longer used.
    release: Callable[[], None]


@dataclass(frozen=True)
class Room:
    """Page-aligned memory for one copy."""

    content: NDArray[np.uint8]
    address: int

    def seen_as(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """The memory as a contiguous tensor."""
        return torch.from_numpy(self.content).view(dtype).view(shape)


class HostMemory:
    """A pool of memory for copies: keeps at most `most_bytes` bytes, unless more is in use."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        #: Bytes in use and in the pool.
        self.num_bytes = 0
        self._free: dict[int, list[Room]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Room:
        """Uninitialised memory of this size."""
        with self._lock:
            if same := self._free.get(num_bytes):
                return same.pop()
            self.num_bytes += num_bytes
            self._shrink(self.most_bytes)
        # Whole pages can bypass the page cache when they are written.
        content = aligned(num_bytes)
        return Room(content, address_of(content))

    def give_back(self, memory: Room) -> None:
        """Return memory to the pool for the next copy of its size."""
        with self._lock:
            self._free.setdefault(len(memory.content), []).append(memory)
            self._shrink(self.most_bytes)

    def let_go(self) -> None:
        """Free all memory that is not in use."""
        with self._lock:
            self._shrink(0)

    def _shrink(self, most_bytes: int) -> None:
        while self.num_bytes > most_bytes and self._free:
            size, same = next(iter(self._free.items()))
            if same:
                same.pop()
                self.num_bytes -= size
            else:
                del self._free[size]


def host_copy(x: Tensor, memory: HostMemory) -> HostCopy:
    """Start the copy."""
    if x.device.type == "cuda":
        return HostCopy(_from_gpu(x.detach()), _nothing)
    num_bytes = x.numel() * x.element_size()
    if num_bytes < _LEAST_BYTES:
        small = x.detach().to("cpu", copy=True).contiguous()
        return HostCopy(lambda: small, _nothing)
    memory_of_copy = memory.take(num_bytes)
    dtype, shape = x.dtype, x.shape
    if num_bytes < _SHARED_BYTES and x.device.type == "cpu" and x.is_contiguous():
        # One call, because a background thread may take the GIL at each torch call.
        ctypes.memmove(memory_of_copy.address, x.data_ptr(), num_bytes)
    else:
        memory_of_copy.seen_as(dtype, shape).copy_(x.detach())
    return HostCopy(
        cache(partial(memory_of_copy.seen_as, dtype, shape)),
        partial(memory.give_back, memory_of_copy),
    )


def _nothing() -> None:
    """Release nothing: pinned memory returns to torch's pool, small memory to the allocator."""


def _from_gpu(x: Tensor) -> Callable[[], Tensor]:
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        x.record_stream(side)
        copied_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied_event.record(side)

    def wait() -> Tensor:
        copied_event.synchronize()
        return host

    return wait


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

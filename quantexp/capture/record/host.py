"""A copy of a tensor in host memory that does not hold up the training step.

From a GPU it goes to pinned memory on a stream of its own: the step goes on, and whoever needs the values waits for the
copy alone. The tensor's memory is not given to others before. On a CPU it is a plain copy, into memory that is used
again: to get fresh memory from the system takes several times as long as to fill it.
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

#: Smaller copies are left to the allocator, which has such memory at hand.
_LEAST_BYTES = 1 << 16
#: Larger ones are worth the wait of torch's threads for each other: two of them copy twice as fast.
_SHARED_BYTES = 1 << 21


@dataclass(frozen=True)
class HostCopy:
    """A copy on its way to host memory."""

    #: Waits for it and gives the contiguous host tensor.
    wait: Callable[[], Tensor]
    #: To be called once nobody looks at that tensor any more.
    release: Callable[[], None]


@dataclass(frozen=True)
class Room:
    """Memory for one copy, from the beginning of a page on."""

    content: NDArray[np.uint8]
    address: int

    def seen_as(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """All of it as a contiguous tensor."""
        return torch.from_numpy(self.content).view(dtype).view(shape)


class HostMemory:
    """Memory for copies: at most so many bytes are held in all, unless more is in use."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        #: Bytes in use and kept for use again.
        self.num_bytes = 0
        self._free: dict[int, list[Room]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Room:
        """Bytes of any content."""
        with self._lock:
            if same := self._free.get(num_bytes):
                return same.pop()
            self.num_bytes += num_bytes
            self._shrink(self.most_bytes)
        # Whole pages can be written past the system's cache.
        content = aligned(num_bytes)
        return Room(content, address_of(content))

    def give_back(self, memory: Room) -> None:
        """Keep what was taken for the next of its size."""
        with self._lock:
            self._free.setdefault(len(memory.content), []).append(memory)
            self._shrink(self.most_bytes)

    def let_go(self) -> None:
        """Return to the system what is not in use."""
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
    """Begin the copy."""
    if x.device.type == "cuda":
        return HostCopy(_from_gpu(x.detach()), _nothing)
    num_bytes = x.numel() * x.element_size()
    if num_bytes < _LEAST_BYTES:
        small = x.detach().to("cpu", copy=True).contiguous()
        return HostCopy(lambda: small, _nothing)
    taken = memory.take(num_bytes)
    dtype, shape = x.dtype, x.shape
    if num_bytes < _SHARED_BYTES and x.device.type == "cpu" and x.is_contiguous():
        # By one call: at each of torch's the background may take the interpreter.
        ctypes.memmove(taken.address, x.data_ptr(), num_bytes)
    else:
        taken.seen_as(dtype, shape).copy_(x.detach())
    return HostCopy(cache(partial(taken.seen_as, dtype, shape)), partial(memory.give_back, taken))


def _nothing() -> None:
    """Pinned memory goes back to torch's own pool, small memory to the allocator."""


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

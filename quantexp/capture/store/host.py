"""Copies a tensor to host memory without blocking the training step.

From a GPU, the copy goes to pinned memory on a side stream: training continues, a reader of the values waits only for
the copy, and the tensor's memory is not reused before it ends. On a CPU the memory of earlier copies is used again:
fresh memory takes several times as long as filling it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


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

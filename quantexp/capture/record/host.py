"""Copies a tensor to host memory without blocking the training step.

From a GPU, the copy goes to pinned memory on a side stream: training continues, a reader of the values waits only for
the copy, and the tensor's memory is not reused before it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def host_copy(x: Tensor) -> Callable[[], Tensor]:
    """Start a copy; the function waits for it and returns the contiguous host tensor."""
    x = x.detach()
    if x.device.type == "cuda":
        return _from_gpu(x)
    copied = x.to("cpu", copy=True, memory_format=torch.contiguous_format)
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

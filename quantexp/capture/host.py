"""A copy of a tensor in host memory that does not hold up the training step.

From a GPU it goes to pinned memory on a stream of its own: the step goes on, and whoever needs the values waits for the
copy alone. The tensor's memory is not given to others before. On a CPU it is a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def host_copy(x: Tensor) -> Callable[[], Tensor]:
    """Begin the copy; what is returned waits for it and gives the contiguous host tensor."""
    x = x.detach()
    if x.device.type != "cuda":
        copied = x.to("cpu", copy=True).contiguous()
        return lambda: copied
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

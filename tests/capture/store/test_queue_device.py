"""Copies from a GPU on a stream of their own, beside work that changes or frees what is copied."""

from __future__ import annotations

import pytest
import torch

from quantexp.capture.store.queue import HostMemory, host_copy, wait_for_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
#: Cycles of the device for which the copies' stream is busy: some tenths of a second.
BUSY = 500_000_000


def keep_copies_waiting(x: torch.Tensor) -> None:
    """Start long work on this thread's stream, for which the stream of the copies waits."""
    torch.cuda._sleep(BUSY)
    x.add_(0)


def test_an_update_waits_for_the_copies_before_it() -> None:
    x = torch.arange(1 << 22, device="cuda", dtype=torch.float32)
    expected = x.cpu()
    keep_copies_waiting(x)
    copied = host_copy(x, HostMemory(0))
    wait_for_copies(x.device)
    x.fill_(-1)
    assert torch.equal(copied(), expected)


def test_memory_that_is_freed_is_not_reused_before_it_is_copied() -> None:
    x = torch.full((1 << 22,), 3.0, device="cuda")
    keep_copies_waiting(x)
    copied = host_copy(x, HostMemory(0))
    del x
    others = [torch.full((1 << 22,), -1.0, device="cuda") for _ in range(4)]
    assert copied().unique().tolist() == [3.0]
    assert others[0][0] == -1


def test_training_is_not_held_up_by_a_copy() -> None:
    x = torch.zeros(1 << 22, device="cuda")
    host_copy(x, HostMemory(0))()  # makes the stream
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = host_copy(x, HostMemory(0))
        wait_for_copies(x.device)
        x.fill_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copied().unique().tolist() == [0.0]

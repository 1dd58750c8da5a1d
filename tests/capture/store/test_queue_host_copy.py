"""Copies in reused memory, which is never reused while a copy is in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About
from quantexp.capture.store.queue import HostMemory, host_copy


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(100_000.0),
        torch.arange(90_000).reshape(300, 300).T.bfloat16(),
        torch.zeros(3, 0),
        torch.tensor(2.5),
        torch.ones(4, requires_grad=True),
    ],
    ids=["large", "transposed", "empty", "scalar", "leaf"],
)
def test_a_copy_is_contiguous_and_its_own(x: torch.Tensor) -> None:
    expected = x.detach().clone()
    copied = host_copy(x, HostMemory(1 << 20))()
    x.detach().fill_(-1)
    assert copied.is_contiguous()
    assert not copied.requires_grad
    assert (copied.dtype, copied.shape) == (expected.dtype, expected.shape)
    assert torch.equal(copied, expected)


def test_memory_is_reused_only_after_its_release() -> None:
    memory, x = HostMemory(1 << 30), torch.zeros(100_000)
    first, second = host_copy(x, memory)(), host_copy(x + 1, memory)()
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    memory.give_back(first)
    assert host_copy(x + 2, memory)().data_ptr() == place
    assert second.unique().tolist() == [1.0]
    assert memory.num_bytes == 800_000


def test_free_memory_stays_within_the_limit() -> None:
    memory = HostMemory(4000)
    for size in (400, 500, 300):
        memory.give_back(memory.take(torch.zeros(size)))
    assert memory.num_bytes <= 4000
    large = memory.take(torch.zeros(5000))
    assert memory.num_bytes == 20_000
    memory.give_back(large)
    assert memory.num_bytes == 0


def test_a_store_has_no_memory_once_no_more_tensors_come(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    for i in range(4):
        store.add(f"bf16/{i}.pt", torch.zeros(100_000), About.of({}))
    store.memory.let_go()
    store.flush()
    assert store.memory.num_bytes == 0
    store.close()

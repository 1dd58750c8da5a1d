"""Copies in memory that is used again, and never while somebody looks at it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantexp.capture.record.host import HostMemory, host_copy
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(100_000.0),
        torch.arange(90_000).reshape(300, 300).T.bfloat16(),
        torch.zeros(3, 0),
        torch.tensor(2.5),
    ],
    ids=["large", "transposed", "empty", "scalar"],
)
def test_a_copy_is_contiguous_and_its_own(x: torch.Tensor) -> None:
    expected = x.clone()
    copied = host_copy(x, HostMemory(1 << 20)).wait()
    x.fill_(-1)
    assert copied.is_contiguous()
    assert (copied.dtype, copied.shape) == (expected.dtype, expected.shape)
    assert torch.equal(copied, expected)


def test_memory_is_used_again_only_after_it_was_released() -> None:
    memory, x = HostMemory(1 << 30), torch.zeros(100_000)
    first, second = host_copy(x, memory), host_copy(x + 1, memory)
    assert first.wait().data_ptr() != second.wait().data_ptr()
    place = first.wait().data_ptr()
    first.release()
    assert host_copy(x + 2, memory).wait().data_ptr() == place
    assert second.wait().unique().tolist() == [1.0]
    assert memory.num_bytes == 800_000


def test_what_is_kept_for_use_again_stays_within_the_limit() -> None:
    memory = HostMemory(1000)
    for size in (400, 500, 300):
        memory.give_back(memory.take(size))
    assert memory.num_bytes <= 1000
    large = memory.take(5000)
    assert memory.num_bytes == 5000
    memory.give_back(large)
    assert memory.num_bytes == 0
    memory.give_back(memory.take(10))
    memory.let_go()
    assert memory.num_bytes == 0


def test_a_store_holds_no_memory_once_it_is_flushed_or_nothing_more_comes(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    for finish in (store.let_go, store.flush):
        for i in range(4):
            store.add(f"bf16/{i}.pt", torch.zeros(100_000), About.of({}))
        finish()
        store.queue.flush()
        assert store.memory.num_bytes == 0
    store.close()


def test_large_copies_begin_with_a_page_of_memory() -> None:
    memory = HostMemory(1 << 20)
    for size in (65_536, 100_000, 1_000_000):
        assert host_copy(torch.zeros(size, dtype=torch.uint8), memory).wait().data_ptr() % 4096 == 0

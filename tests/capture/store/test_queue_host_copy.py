"""Copies in reused memory, which is never reused while a copy is in use."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quantexp.capture.store import queue
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About
from quantexp.capture.store.queue import HostMemory, host_copy, wait_for_copies


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


class FakeStream(TorchFunctionMode):
    """A GPU's stream, for tensors on the CPU: it copies what is in memory when somebody waits for it."""

    def __init__(self, device: object = None) -> None:
        self.copies: list[tuple[torch.Tensor, int]] = []
        self.is_done = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {
            k: v for k, v in (kwargs or {}).items() if k not in ("pin_memory", "non_blocking")
        }
        if func is torch.Tensor.copy_:
            self.copies.append((args[0], args[1].data_ptr()))
            return args[0]
        return func(*args, **kwargs)

    def synchronize(self) -> None:
        for host, source in self.copies:
            ctypes.memmove(host.data_ptr(), source, host.nbytes)
        self.is_done = True

    def wait_stream(self, stream: object) -> None:
        pass


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream.is_done

    def synchronize(self) -> None:
        self.stream.synchronize()


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Fake streams; the devices that are made current."""
    devices: list[torch.device] = []

    def enter(device: torch.device) -> contextlib.AbstractContextManager[None]:
        devices.append(device)
        return contextlib.nullcontext()

    for name, fake in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": FakeStream,
        "stream": lambda stream: stream,
        "device": enter,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    queue._side_of.cache_clear()
    yield devices
    queue._side_of.cache_clear()


@pytest.mark.usefixtures("entered")
def test_autograd_adds_nothing_into_a_gradient_that_is_still_copied_from_a_gpu() -> None:
    """The gradient of a sum is that of its first summand too, and autograd adds the second one's to it in place."""
    copied = []
    x = torch.ones(1000, requires_grad=True)
    both = x + torch.sin(x)
    both.register_hook(lambda gradient: copied.append(queue._from_gpu(gradient)))
    (both * torch.full((1000,), 3.0)).sum().backward()
    assert bool((copied[0]() == 3.0).all())


def test_a_copied_tensor_is_freed_with_the_next_copy_or_step(entered: list[torch.device]) -> None:
    x = torch.ones(1000)
    memory = x.untyped_storage()._weak_ref()
    copied = queue._from_gpu(x)
    side = queue._side_of(x.device)
    del x
    queue._from_gpu(torch.zeros(1))
    assert not torch.UntypedStorage._expired(memory), "its copy still runs"
    copied()
    assert entered == [torch.device("cpu")], "whoever waits has no device of its own"
    queue._from_gpu(torch.zeros(1))
    assert torch.UntypedStorage._expired(memory)
    assert len(side.running) == 1
    gpu = torch.device("cuda", 0)
    queue._side_of(gpu).running.extend(side.running)
    wait_for_copies(gpu)
    assert not queue._side_of(gpu).running

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.training.megatron import cpu
from quantexp.training.megatron.cpu import (
    cpu_device,
    gathering_unlike,
    padded,
    scattering_unlike,
)


def cuda_functions() -> dict[str, object]:
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module, name, _ in cpu._replacements()
    } | {cpu._BACKWARD: getattr(torch.autograd, cpu._BACKWARD)}


def test_everything_is_restored() -> None:
    before = cuda_functions()
    with cpu_device():
        assert cuda_functions() != before
    assert cuda_functions() == before


def test_everything_is_restored_after_an_error() -> None:
    before = cuda_functions()
    with pytest.raises(ZeroDivisionError), cpu_device():
        _ = 1 / 0
    assert cuda_functions() == before


def test_it_does_nothing_if_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = cuda_functions()
    modes = torch.overrides._len_torch_function_stack()  # type: ignore[attr-defined]
    with cpu_device():
        assert cuda_functions() == before
        assert torch.overrides._len_torch_function_stack() == modes  # type: ignore[attr-defined]


def test_the_device_cuda_means_the_cpu_inside() -> None:
    with cpu_device():
        x = torch.zeros(2, device="cuda")
        assert x.device.type == "cpu"
        assert torch.zeros(2, dtype=torch.int32, device="cuda").dtype == torch.int32
        assert x.cuda() is x
        assert x.to(torch.device("cuda", 0)).device.type == "cpu"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.cuda.current_device() == torch.device("cpu")  # type: ignore[comparison-overlap]
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_the_device_cuda_means_the_cpu_in_the_backward_pass() -> None:
    class CreatesOnCuda(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] + torch.ones(1, device="cuda")

    x = torch.zeros(1, requires_grad=True)
    with cpu_device():
        CreatesOnCuda.apply(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 2


def test_the_generators_state_is_the_cpus() -> None:
    with cpu_device():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(4), first)


def test_streams_and_events_are_always_complete() -> None:
    with cpu_device():
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            event.record()
            stream.wait_event(event)
            stream.wait_stream(torch.cuda.current_stream())
        stream.synchronize()
        event.wait()
        event.synchronize()
        assert stream.record_event().query()
        torch.cuda.synchronize()


# Collectives of tensors with unlike extents, against the concatenation and the sum that they stand for.


def only_alike(tensors: list[Tensor], *others: Tensor) -> None:
    """Refuse what gloo refuses."""
    if len({tuple(each.shape) for each in (*tensors, *others)}) > 1:
        raise RuntimeError("invalid tensor size")


@pytest.mark.parametrize("lengths", [(3, 5), (0, 2), (4, 4)])
def test_unlike_tensors_are_gathered_whole(lengths: tuple[int, int]) -> None:
    own = [torch.randn(n, 2) for n in lengths]
    longest = max(lengths)

    def gloo(tensors: list[Tensor], x: Tensor, *_: Any) -> None:
        only_alike(tensors, x)
        for target, source in zip(tensors, own, strict=True):
            target.copy_(padded(source, longest))

    for mine in own:
        targets = [torch.full((n, 2), torch.nan) for n in lengths]
        gathering_unlike(gloo)(targets, mine)
        assert all(map(torch.equal, targets, own))


@pytest.mark.parametrize("lengths", [(3, 5), (0, 2), (4, 4)])
def test_unlike_tensors_are_reduced_and_scattered(lengths: tuple[int, int]) -> None:
    inputs = [[torch.randn(n, 2) for n in lengths] for _ in range(2)]
    longest = max(lengths)
    for rank, n in enumerate(lengths):

        def gloo(output: Tensor, mine: list[Tensor], *_: Any, rank: int = rank) -> None:
            only_alike(mine, output)
            output.copy_(torch.stack([padded(each[rank], longest) for each in inputs]).sum(0))

        output = torch.full((n, 2), torch.nan)
        scattering_unlike(gloo)(output, inputs[rank])
        assert torch.equal(output, inputs[0][rank] + inputs[1][rank])

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from megatron.core.utils import local_multi_tensor_scale
from torch import Tensor
from torch.optim import adam as torch_adam

from quantexp.training.megatron import cpu
from quantexp.training.megatron.cpu import (
    adam_in_strips,
    cpu_device,
    gathering_unlike,
    padded,
    scale_each,
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


STEPS = 3


def run_steps(shapes: list[tuple[int, ...]], **options: Any) -> tuple[list[Tensor], list[Any]]:
    """The weights and the optimizer's state after `STEPS` steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.01, **options)
    for _ in range(STEPS):
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator) * 1e-3
        optimizer.step()
    return weights, list(optimizer.state.values())


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "eps": 1e-3}])
def test_weights_and_state_are_torchs_to_the_last_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = [(64, 64), (3, 5, 7), (1,), (), (2, 65)]
    expected = run_steps(shapes, **options)
    monkeypatch.setattr(cpu, "STRIP", 64)
    with cpu_device():
        assert torch_adam.adam is adam_in_strips
        result = run_steps(shapes, **options)
    assert torch_adam.adam is not adam_in_strips
    for a, b in zip(result[0], expected[0], strict=True):
        assert torch.equal(a, b)
    for one, other in zip(result[1], expected[1], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert one["step"] == STEPS


def test_weights_that_are_not_contiguous_use_torchs_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_step() -> Tensor:
        w = torch.ones(4, 6).t().requires_grad_()
        optimizer = torch.optim.AdamW([w], lr=0.1)
        w.grad = torch.arange(24.0).view(6, 4)
        optimizer.step()
        return w

    expected = run_step()
    monkeypatch.setattr(cpu, "STRIP", 4)
    with cpu_device():
        assert torch.equal(run_step(), expected)


def test_a_step_allocates_no_memory_of_a_weights_size() -> None:
    w = torch.zeros(1 << 24, requires_grad=True)
    w.grad = torch.ones_like(w)
    with cpu_device():
        optimizer = torch.optim.AdamW([w], lr=0.1)
        optimizer.step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults * resource.getpagesize() < w.nbytes / 4


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_tensors_are_megatrons_to_the_last_bit(scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator) for shape in ((64, 3), (5,))]
    theirs, ours = ([torch.empty_like(x, dtype=dtype) for x in sources] for _ in range(2))
    unused = torch.zeros(1)
    local_multi_tensor_scale(1, unused, [sources, theirs], scale)
    scale_each(1, unused, [sources, ours], scale)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    in_place = [x.clone() for x in sources]
    scale_each(1, unused, [in_place, in_place], scale)
    assert all(torch.equal(a, x * scale) for a, x in zip(in_place, sources, strict=True))

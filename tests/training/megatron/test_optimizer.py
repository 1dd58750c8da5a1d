"""The optimizer step equals torch's and Megatron's and needs less memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from megatron.core.utils import local_multi_tensor_scale
from torch import Tensor
from torch.optim import adam as torch_adam

from quantexp.training.megatron import optimizer as own
from quantexp.training.megatron.cpu import cpu_device
from quantexp.training.megatron.optimizer import adam_in_strips, scale_each

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
    monkeypatch.setattr(own, "STRIP", 64)
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
    monkeypatch.setattr(own, "STRIP", 4)
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

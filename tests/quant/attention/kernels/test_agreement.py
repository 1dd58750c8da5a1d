"""Comparison of the kernels' results with those of the tiles: what is accepted, and the messages otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels.agreement import BOUND, require_gradients, require_output
from quantexp.quant.attention.kernels.gpu import Amaxes, Kernels, Quantised
from quantexp.quant.attention.plain import by_head, expanded
from quantexp.quant.attention.tile_products import TileProducts
from quantexp.quant.sites import DGRAD_Q_DS, FPROP_P, Operand
from quantexp.quant.step_state import StepState, use_step_state

from .tiled_cases import FULL_HIFP8, declared, operands


class Known(Kernels):
    """Returns a known o and no gradients under any scales; calls without a known o fail."""

    def __init__(self, amaxes: Amaxes | None = None, o: Tensor | None = None) -> None:
        super().__init__(AttentionCall(declared(*FULL_HIFP8), 1.0))
        self.amaxes = amaxes or {}
        self.o = o
        self.calls: list[Amaxes | None] = []

    def forward(self, quantised: Quantised, amaxes: Amaxes | None = None) -> Tensor:
        self.calls.append(amaxes)
        assert self.o is not None
        return self.o

    def backward(
        self, quantised: Quantised, amaxes: Amaxes | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("the kernels were asked for gradients")


@pytest.fixture
def work() -> Iterator[TileProducts]:
    """B 2, H 6, G 2, D 32, 40 tokens; dO of ones."""
    q, k, v = operands(torch.bfloat16, 40)
    products = TileProducts(AttentionCall(declared(*FULL_HIFP8), 1.0), q, lambda S, start: S)
    dO = torch.ones(12, 40, 32, dtype=torch.bfloat16)
    with use_step_state(StepState(1)) as state, products.inputs(q=q, k=k, v=v, dO=dO):
        state.begin(1, 0)
        yield products


def some() -> Tensor:
    return torch.randn(12, 40, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def with_a_head_off_by(x: Tensor, part: float) -> Tensor:
    x = x.clone()
    x[5] *= 1 + part
    return x


def test_a_head_within_the_bound_is_accepted(work: TileProducts) -> None:
    require_output(Known(), work, with_a_head_off_by(some(), BOUND), some())


def test_a_head_beyond_the_bound_is_refused(work: TileProducts) -> None:
    message = (
        r"layer 0 attention: o of Triton's kernel is not that of the tiles of torch: head 5 differs by \S+ where its "
        r"norm is \S+, allowed are 0.00781 of that; use training.attention=plain"
    )
    with pytest.raises(EngagementError, match=message):
        require_output(Known(), work, with_a_head_off_by(some(), 3 * BOUND), some())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_gradient_is_compared(work: TileProducts, which: int) -> None:
    theirs = (some() * 100,) * 3
    require_gradients(Known(), work, theirs, theirs)
    off = with_a_head_off_by(theirs[which], 3 * BOUND)
    dq, dk, dv = (off if at == which else x for at, x in enumerate(theirs))
    with pytest.raises(EngagementError, match=f"{('dq', 'dk', 'dv')[which]} of Triton's kernel"):
        require_gradients(Known(), work, (dq, dk, dv), theirs)


def test_pure_rounding_errors_are_accepted_in_dq_and_dk_but_not_in_dv(
    work: TileProducts,
) -> None:
    """dS is zero except for rounding: a part in 2^20 of |dO| |v|."""
    q, k, v = (by_head(expanded(work.tensors[Operand(name)], 6)) for name in "qkv")
    largest = min(float(x.float().norm(dim=2).max()) for x in (q, k))
    noise = some() * 2.0**-20 * float(v.float().norm(dim=2).max()) * largest
    zeros = torch.zeros_like(noise)
    require_gradients(Known(), work, (noise, noise, zeros), (zeros,) * 3)
    with pytest.raises(EngagementError, match="dv of Triton's kernel"):
        require_gradients(Known(), work, (noise, noise, noise), (zeros,) * 3)


def test_nan_is_refused_unless_the_tiles_have_it(work: TileProducts) -> None:
    broken = some()
    broken[3, 2, 1] = torch.nan
    with pytest.raises(EngagementError, match="head 3 differs by nan"):
        require_output(Known(), work, broken, some())
    require_output(Known(), work, some(), broken)


def test_under_another_scale_the_kernels_are_compared_under_the_tiles_own(
    work: TileProducts,
) -> None:
    work.amaxes = {FPROP_P: torch.tensor(1.0)}
    same = Known({FPROP_P: torch.tensor(1.0)})
    require_output(same, work, some(), some())
    assert same.calls == []
    kernels = Known({FPROP_P: torch.tensor(1 - 2.0**-8)}, some())
    require_output(kernels, work, some() * 2, some())
    assert kernels.calls == [work.amaxes]


def test_different_amaxes_are_refused(work: TileProducts) -> None:
    work.amaxes = {DGRAD_Q_DS: torch.tensor(1.0)}
    kernels = Known({DGRAD_Q_DS: torch.tensor(2.5)})
    message = (
        "layer 0 attention qk.dgrad_q.dS: its amax is 2.5 in Triton's kernel and 1 in the tiles of torch; use "
        "training.attention=plain"
    )
    with pytest.raises(EngagementError, match=message):
        require_gradients(kernels, work, (some(),) * 3, (some(),) * 3)

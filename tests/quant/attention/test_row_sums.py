"""Rows that are divided after their product with v, and delta of dO and o.

In exact arithmetic both are the softmax. In float32 o differs by roundings of 2^-24 in sums of up to 100 terms: 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from quantexp.formats.types import Delta
from quantexp.quant.attention import tiled, tiles
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.attention.row_sums import Exponentials, OutputSums, with_output_sums
from quantexp.quant.hooks import hook_operands
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import FPROP_P
from quantexp.quant.step_state import StepState, use_step_state

from .kernels.tiled_cases import (
    FULL_HIFP8,
    FULL_MXFP8,
    Result,
    declared,
    documents,
    far,
    fresh,
    operands,
    softmax,
    with_gradients,
)

BOTH = "quant.pv={unnormalised: true, max_factor: 2, delta: o}"
SCHEMES = {
    "bf16": ("quant=bf16", BOTH),
    "unnormalised alone": ("quant=bf16", "quant.pv.unnormalised=true"),
    "delta alone": ("quant=bf16", "quant.pv.fprop.P.delta=o"),
    "mxfp8": (*FULL_MXFP8, BOTH),
    "hifp8, one scale for all tiles": (*FULL_HIFP8, BOTH),
    "stochastic": (
        *("quant=bf16", BOTH),
        "quant.pv.fprop.P={format: mxfp4, rounding: stochastic}",
    ),
    "3/4 after a transform": (
        *("quant=bf16", BOTH),
        "quant.pv.fprop.P={format: mxfp4, pre_scale: true, hadamard: deterministic}",
        "quant.pv.fprop.v={format: mxfp8, hadamard: deterministic}",
    ),
}


@pytest.fixture(autouse=True)
def _moment() -> Iterator[None]:
    with use_step_state(StepState(1)) as state:
        state.begin(1, 0)
        yield


def _hidden(S: Tensor, mask: Tensor | None, start: int) -> Tensor:
    R, K = S.shape[2:]
    if mask is not None:
        return mask[:, :, start : start + R, :K]
    return torch.arange(K) > torch.arange(start, start + R)[:, None]


def _probabilities(
    mask: Tensor | None, S: Tensor, start: int = 0, delta: OutputSums | None = None
) -> Tensor:
    P = softmax(S, mask, start)
    if delta is None:
        return P
    return with_output_sums(S, P.detach(), _hidden(S, mask, start), delta)


def _exponentials(
    factor: float | None, mask: Tensor | None, S: Tensor, start: int = 0
) -> tuple[Tensor, Tensor]:
    E, sums = Exponentials()(S, _hidden(S, mask, start), factor)
    return E, sums


def in_tiles(precision: ModulePrecision, qkv: list[Tensor], mask: Tensor | None = None) -> Result:
    q, k, v = fresh(qkv)
    factor = precision.spec(FPROP_P).softmax.max_factor
    call = AttentionCall(precision, 0.2, mask=mask)
    functions = partial(_probabilities, mask), partial(_exponentials, factor, mask)
    return with_gradients(tiled.attention(call, q, k, v, *functions), q, k, v)


def whole(precision: ModulePrecision, qkv: list[Tensor], mask: Tensor | None = None) -> Result:
    q, k, v = fresh(qkv)
    T, B, H, _ = q.shape
    of = precision.spec(FPROP_P).softmax
    call = AttentionCall(precision, 0.2)
    S = scores(call, q, k).view(B, H, T, T)
    delta = OutputSums() if of.delta is Delta.O else None
    P = _probabilities(mask, S, 0, delta).reshape(B * H, T, T)
    exponentials = None
    if of.unnormalised:
        E, sums = _exponentials(of.max_factor, mask, S)
        exponentials = E.view(B * H, T, T), sums.view(B * H, T, 1)
    return with_gradients(context(call, P, v, exponentials, delta), q, k, v)


@pytest.mark.parametrize("words", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_tiles_give_the_plain_paths_result(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], masked: bool
) -> None:
    """o and dq are bit-identical; dk and dv are sums in another order (`test_tiled`)."""
    monkeypatch.setattr(tiles, "ROWS", 32)
    mask = documents(137) if masked else None
    precision, qkv = declared(*words), operands(torch.bfloat16, 137)
    ours, theirs = in_tiles(precision, qkv, mask), whole(precision, qkv, mask)
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours[2:], theirs[2:], strict=True):
        assert far(one, other) <= 2**-12


@pytest.mark.parametrize("words", list(SCHEMES.values())[:3], ids=list(SCHEMES)[:3])
@pytest.mark.parametrize("path", [in_tiles, whole])
def test_float32_is_the_softmax_up_to_rounding(
    words: tuple[str, ...], path: Callable[[ModulePrecision, list[Tensor]], Result]
) -> None:
    qkv = operands(torch.float32, 96)
    for one, other in zip(
        path(declared(*words), qkv), path(declared("quant=bf16"), qkv), strict=True
    ):
        assert far(one, other) < 1e-6


def test_division_after_the_product_leaves_the_gradients_bit_for_bit() -> None:
    qkv = operands(torch.bfloat16, 96)
    ours = whole(declared(*SCHEMES["unnormalised alone"]), qkv)
    stock = whole(declared("quant=bf16"), qkv)
    assert not torch.equal(ours[0], stock[0])
    for one, other in zip(ours[1:], stock[1:], strict=True):
        assert torch.equal(one, other)


def test_delta_is_of_the_rounded_output() -> None:
    """dS = P (dP - sum of dO o) in float64 of o as it is in bfloat16; one rounding of dS to bfloat16 is 2^-9."""
    generator = torch.Generator().manual_seed(1)
    S = torch.randn(1, 2, 8, 8, generator=generator).bfloat16().requires_grad_()
    v, dO, dP = (
        torch.randn(s, generator=generator).bfloat16() for s in ((2, 8, 4),) * 2 + ((2, 8, 8),)
    )
    delta = OutputSums()
    P = _probabilities(None, S, 0, delta)
    o = (P.detach()[0].float() @ v.float()).bfloat16()
    delta.see(dO, o)
    (dS,) = torch.autograd.grad(P, S, dP[None])
    exact = torch.softmax(S.detach().double().masked_fill(_hidden(S, None, 0), -torch.inf), -1)[0]
    sums = (dO.double() * o.double()).sum(-1, keepdim=True)
    assert far(dS[0], exact * (dP.double() - sums)) < 2**-8
    assert far(dS[0], exact * (dP.double() - (exact * dP.double()).sum(-1, keepdim=True))) > 0.1


def _example(factor: float | None) -> float:
    """The row of arXiv 2510.04212, section 3.3.2: two maxima beside v of -2.40625 and -2.296875, and a residue."""
    S = torch.tensor([1.0, 1.0, 1.0 - 6.9375]).bfloat16().view(1, 1, 1, 3)
    E, sums = Exponentials()(S, torch.zeros(1, 3, dtype=torch.bool), factor)
    v = torch.tensor([-2.40625, -2.296875, -0.88671875]).bfloat16().view(3, 1, 1, 1)
    P = torch.zeros(1, 1, 3).bfloat16()
    o = context(AttentionCall(declared("quant=bf16"), 1.0), P, v, (E[0], sums[0]))
    return float(o)


def test_biased_rounding_and_its_remedy_are_those_of_the_paper() -> None:
    """The sum -4.70399 becomes -4.71875, an error of -0.0148, unless m is raised: then o is rounded correctly."""
    row = (-2.40625 - 2.296875 - 0.88671875 * 2.0**-10) / (2 + 2.0**-10)
    right = float(torch.tensor(row).bfloat16())
    assert _example(None) == float(torch.tensor(-4.71875 / (2 + 2.0**-10)).bfloat16()) != right
    assert _example(2.0) == right


@pytest.mark.parametrize(
    ("row", "m"),
    [
        ((3.0, 3.0, 1.0), 6.0),
        ((3.0, 2.0, 1.0), 3.0),
        ((-3.0, -3.0, -4.0), 0.0),
        ((-3.0, -3.5, -4.0), -3.0),
        ((0.0, 0.0, -4.0), 0.0),
        ((3.0, 1.0, 3.0), 3.0),
    ],
    ids=["positive", "one", "negative", "one negative", "zero", "hidden"],
)
def test_m_is_raised_where_several_visible_scores_are_the_maximum(
    row: tuple[float, ...], m: float
) -> None:
    S = torch.tensor(row).view(1, 1, 1, 3)
    hidden = torch.tensor([[False, False, row[2] == 3.0]])
    E, sums = Exponentials()(S, hidden, 2.0)
    expected = torch.exp(S - m).masked_fill(hidden, 0.0)
    assert torch.equal(E, expected)
    assert torch.equal(sums, expected.sum(-1, keepdim=True))
    assert torch.equal(S.flatten(), torch.tensor(row)), "scores are left as they are"


def test_a_row_that_underflows_has_no_finite_result() -> None:
    S = torch.full((1, 1, 1, 2), 200.0).bfloat16()
    E, sums = Exponentials()(S, torch.zeros(1, 2, dtype=torch.bool), 2.0)
    P, v = torch.zeros(1, 1, 2).bfloat16(), torch.ones(2, 1, 1, 1).bfloat16()
    assert context(AttentionCall(declared("quant=bf16"), 1.0), P, v, (E[0], sums[0])).isnan().all()


@pytest.mark.parametrize("path", [in_tiles, whole])
def test_hooks_of_the_operand_receive_what_is_multiplied(
    path: Callable[[ModulePrecision, list[Tensor]], Result],
) -> None:
    precision = declared(*FULL_MXFP8, BOTH)
    seen: dict[str, Tensor] = {}

    def hook(precision: object, slot: object, x: Tensor, quantised: Tensor, layout: object) -> None:
        seen[str(slot)] = x

    with hook_operands(hook):
        path(precision, operands(torch.bfloat16, 64))
    forward, backward = seen["pv.fprop.P"].flatten(0, -3), seen["pv.dgrad_v.P"].flatten(0, -3)
    assert forward[:, 0, 0].eq(1).all()
    assert backward.float().sum(-1).sub(1).abs().max() < 2**-6
    assert forward.float().sum(-1).max() > 2

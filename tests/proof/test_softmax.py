"""Rows of P and dS against torch's softmax in every dtype, and against planted errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantexp.proof.softmax import (
    Tile,
    num_wrong_exponentials,
    num_wrong_gradients,
    num_wrong_probabilities,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tile(
    dtype: torch.dtype, spread: float, kept: torch.dtype = torch.float32
) -> tuple[Tile, Tensor, Tensor]:
    """A tile with dP, and P and dS as Megatron's softmax, which runs in `kept`, and autograd compute them."""
    generator = torch.Generator().manual_seed(0)
    S = (torch.randn(32, 96, generator=generator) * spread).to(dtype).requires_grad_()
    hidden = torch.arange(96) > torch.arange(32)[:, None] + 40
    P = torch.softmax(S.to(kept).masked_fill(hidden, -10000.0), dim=-1).to(dtype)
    dP = torch.randn(32, 96, generator=generator).to(dtype)
    (dS,) = torch.autograd.grad(P, S, dP)
    rows = S.detach()
    return Tile(0, rows, hidden, dP), P.detach(), dS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_megatrons_softmax_is_within_the_bounds(
    dtype: torch.dtype, spread: float, in_fp32: bool
) -> None:
    kept = torch.float32 if in_fp32 else dtype
    of, P, dS = tile(dtype, spread, kept)
    assert num_wrong_probabilities(P, of) == 0
    assert num_wrong_gradients(dS, of, kept) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_probabilities_and_gradients_are_wrong(dtype: torch.dtype) -> None:
    of, P, dS = tile(dtype, 1.0)
    assert num_wrong_probabilities((P * 0.9).to(dtype), of) > 1000
    assert num_wrong_probabilities(torch.softmax(2 * of.S, dim=-1), of) > 1000
    assert num_wrong_gradients(torch.zeros_like(dS), of, torch.float32) > 1000
    assert num_wrong_gradients((dS * 1.05).to(dtype), of, torch.float32) > 1000
    assert num_wrong_gradients((dS * 1.05).to(dtype), of, dtype) > 800


def exponentials(of: Tile, factor: float | None) -> tuple[Tensor, Tensor]:
    """exp(S - m) and its row sums in float32, as torch computes them; m is raised where the maximum is repeated."""
    S = of.S.float().masked_fill(of.hidden, -torch.inf)
    m = S.amax(-1, keepdim=True)
    if factor is not None:
        repeated = (m == S).sum(-1, keepdim=True) > 1
        m = torch.where(repeated, (factor * m).relu(), m)
    E = torch.exp(S - m)
    return E.to(of.S.dtype), E.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("factor", [None, 2.0, 7.0])
def test_exponentials_are_within_the_bounds(
    dtype: torch.dtype, spread: float, factor: float | None
) -> None:
    of = tile(dtype, spread)[0]
    assert num_wrong_exponentials(*exponentials(of, factor), of, factor) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_exponentials_and_sums_are_wrong(dtype: torch.dtype) -> None:
    """Of scores that are halves, most rows have their maximum several times, some of them a negative one."""
    of = tile(dtype, 1.0)[0]
    of.S = (of.S * 2 - 3).round() / 2
    E, sums = exponentials(of, 2.0)
    assert num_wrong_exponentials(E, sums, of, 2.0) == 0
    assert num_wrong_exponentials(E, sums, of, None) > 500
    assert num_wrong_exponentials(*exponentials(of, None), of, 2.0) > 500
    assert num_wrong_exponentials((E / sums).to(dtype), sums, of, 2.0) > 500
    assert num_wrong_exponentials(E, sums * 1.001, of, 2.0) == len(sums)


def test_delta_of_the_output_replaces_the_sums_of_p() -> None:
    of, _, dS = tile(torch.bfloat16, 1.0)
    assert of.dP is not None
    sums = (of.P * of.dP.double()).sum(-1, keepdim=True)
    of.delta = sums, sums.abs()
    assert num_wrong_gradients(dS, of, torch.float32) == 0
    of.delta = sums + 0.01, sums.abs()
    assert num_wrong_gradients(dS, of, torch.float32) > 300

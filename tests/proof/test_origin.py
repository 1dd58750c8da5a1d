"""Operands that cannot be judged without their source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from quantexp.formats import Hadamard, Rounding, Scaling, resolve
from quantexp.proof.grids import Status
from quantexp.proof.origin import FAR, distance, needs_origin, scale_amax
from quantexp.proof.verdict import judge
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.step_state import StepState, use_step_state

STREAM = "layer 0 fc1 linear.wgrad.g"
MXFP4 = replace(resolve("mxfp4_e2m1", rounding=Rounding.STOCHASTIC), stream=STREAM)
RANDOM = replace(MXFP4, hadamard=Hadamard.RANDOM, hadamard_block=64, pre_scale=True)
NVFP4 = replace(resolve("nvfp4_e2m1", scaling=Scaling.EXACT), stream=STREAM)
HIFP8 = replace(resolve("hifp8", scaling=Scaling.DELAYED), window=2, stream=STREAM)


@pytest.fixture(autouse=True)
def state() -> Iterator[StepState]:
    with use_step_state(StepState(1)) as at_work:
        yield at_work


def normal(seed: int = 1) -> torch.Tensor:
    return torch.randn(256, 192, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_only_operands_that_cannot_be_judged_alone_need_their_origin() -> None:
    assert not needs_origin(MXFP4)
    assert not needs_origin(replace(MXFP4, pre_scale=True))
    assert not needs_origin(NVFP4)
    assert needs_origin(RANDOM)
    assert needs_origin(HIFP8)
    assert needs_origin(replace(NVFP4, rounding=Rounding.STOCHASTIC))
    assert needs_origin(replace(NVFP4, pre_scale=True))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("left", [True, False])
def test_only_a_transformed_operand_is_near_its_transform(axis: int, left: bool) -> None:
    x, operand = normal(), replace(RANDOM, left=left)
    y = quantise_operand(x, operand, axis)
    assert distance(y, operand, x, axis) < FAR / 2
    for other in (
        quantise_operand(x, replace(operand, hadamard=Hadamard.NONE), axis),
        quantise_operand(normal(2), operand, axis),
    ):
        assert distance(other, operand, x, axis) > 2 * FAR
    assert judge(y, operand, axis, x).status is Status.ENGAGED
    assert (
        judge(quantise_operand(normal(2), operand, axis), operand, axis, x).status
        is Status.MISMATCH
    )


def test_a_transformed_operand_without_its_source_is_a_mismatch() -> None:
    finding = judge(quantise_operand(normal(), RANDOM, 0), RANDOM, 0)
    assert finding.status is Status.MISMATCH
    assert (
        finding.reason
        == "its source before quantisation is missing, and it cannot be judged without"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pre_scale", [False, True])
@pytest.mark.parametrize("transform", [Hadamard.NONE, Hadamard.RANDOM])
def test_nvfp4_is_judged_at_the_scale_of_its_source(
    dtype: torch.dtype, pre_scale: bool, transform: Hadamard
) -> None:
    x = normal().to(dtype)
    for rounding in Rounding:
        operand = replace(
            NVFP4,
            rounding=rounding,
            pre_scale=pre_scale,
            hadamard=transform,
            hadamard_block=16,
        )
        assert judge(quantise_operand(x, operand, 0), operand, 0, x).status is Status.ENGAGED


def test_a_delayed_scale_is_that_of_the_iterations_before(state: StepState) -> None:
    x = normal()
    assert scale_amax(HIFP8, x, 0) == x.abs().max()
    quantise_operand(40 * x, HIFP8, 0)
    state.finish()
    assert scale_amax(HIFP8, x, 0) == (40 * x).abs().max()
    y = quantise_operand(x, HIFP8, 0)
    assert judge(y, HIFP8, 0, x).status is Status.ENGAGED
    own = quantise_operand(x, replace(HIFP8, scaling=Scaling.CURRENT), 0)
    assert judge(own, HIFP8, 0, x).status is Status.MISMATCH

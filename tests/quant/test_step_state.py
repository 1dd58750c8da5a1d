"""The state that determines random numbers and delayed scales."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quantexp.formats import (
    Axis,
    Hadamard,
    Rounding,
    Scaling,
    finite_amax,
    hadamard,
    quantise,
    resolve,
)
from quantexp.quant.multiply import clipped, quantise_operand
from quantexp.quant.step_state import StepState, current_state, seed_of, use_step_state

CPU = torch.device("cpu")
STREAM = "layer 0 fc1 linear.wgrad.g"
STOCHASTIC = replace(
    resolve("mxfp4_e2m1", rounding=Rounding.STOCHASTIC), axis=Axis.TOKENS, stream=STREAM
)
DELAYED = replace(
    resolve("hifp8", scaling=Scaling.DELAYED), axis=Axis.TOKENS, window=2, stream=STREAM
)
RANDOM = replace(
    resolve("mxfp4_e2m1"),
    axis=Axis.TOKENS,
    hadamard=Hadamard.RANDOM,
    hadamard_block=16,
    stream=STREAM,
)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_seed_is_a_hash_of_the_trainings_and_the_stream() -> None:
    digest = hashlib.sha256(b"1234 layer 0 fc1 linear.wgrad.g").hexdigest()
    assert seed_of(1234, STREAM) == int(digest[:16], 16)
    assert seed_of(1234, STREAM) != seed_of(1235, STREAM)


def test_an_offset_is_iteration_and_micro_batch() -> None:
    state = StepState(1)
    state.begin(3, 5)
    assert state.offset == 3 * 2**32 + 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_stochastic_operand_is_quantised_with_its_seed_and_offset(dtype: torch.dtype) -> None:
    x = normal(64, 48, dtype=dtype)
    state = StepState(9, iteration=2, micro_batch=1)
    with use_step_state(state):
        y = quantise_operand(x, STOCHASTIC, 0)
    draw: dict[str, Any] = {"seed": seed_of(9, STREAM), "offset": state.offset}
    assert state.draw(STOCHASTIC) == draw
    assert torch.equal(y, quantise(x, "mxfp4", axis=0, rounding="stochastic", **draw))
    assert y.dtype == dtype


def test_each_micro_batch_has_numbers_of_its_own_and_repeats_them() -> None:
    x = normal(64, 48)
    state = StepState(9)
    with use_step_state(state):
        state.begin(1, 0)
        first = quantise_operand(x, STOCHASTIC, 0)
        state.begin(1, 1)
        other = quantise_operand(x, STOCHASTIC, 0)
        state.begin(1, 0)
        assert torch.equal(quantise_operand(x, STOCHASTIC, 0), first)
    assert not torch.equal(first, other)


def test_a_weight_that_is_quantised_once_a_step_has_the_first_micro_batchs_numbers() -> None:
    """In any process, and therefore for captures, which record seed and offset."""
    weight = replace(STOCHASTIC, weight=True)
    signed = replace(RANDOM, weight=True, rounding=Rounding.STOCHASTIC)
    for once, operand, offset in (
        (True, weight, 3 << 32),
        (False, weight, (3 << 32) + 5),
        (True, STOCHASTIC, (3 << 32) + 5),
        (True, signed, (3 << 32) + 5),
    ):
        state = StepState(9, weights_once=once)
        state.begin(3, 5)
        assert state.record(operand)["offset"] == state.draw(operand)["offset"] == offset


def test_an_operand_of_another_micro_batch_has_its_numbers() -> None:
    state = StepState(9)
    state.begin(3, 5)
    with state.later(-2):
        assert state.offset == (3 << 32) + 3
    assert state.offset == (3 << 32) + 5


def test_micro_batches_draw_again_unless_a_weight_is_quantised_once_a_step() -> None:
    weight = replace(STOCHASTIC, weight=True)
    for once, operand, again in (
        (True, weight, False),
        (False, weight, True),
        (True, STOCHASTIC, True),
        (True, RANDOM, True),
        (True, replace(RANDOM, weight=True), True),
        (False, DELAYED, False),
        (False, replace(RANDOM, hadamard=Hadamard.DETERMINISTIC), False),
    ):
        assert StepState(9, weights_once=once).draws_again(operand) is again


def test_both_operands_of_a_product_have_the_same_signs() -> None:
    state = StepState(9)
    right = replace(RANDOM, left=False, stream="layer 0 fc1 linear.wgrad.x")
    signs = state.signs(RANDOM, CPU)
    assert signs is not None
    assert signs.shape == (16,)
    others = state.signs(right, CPU)
    assert others is not None
    assert torch.equal(signs, others)
    assert state.signs(STOCHASTIC, CPU) is None
    state.begin(1, 1)
    later = state.signs(RANDOM, CPU)
    assert later is not None
    assert not torch.equal(signs, later)


def test_a_transformed_operand_is_the_transform_on_the_grid() -> None:
    x = normal(64, 48)
    state = StepState(9)
    with use_step_state(state):
        y = quantise_operand(x, RANDOM, 0)
    v = hadamard(x, axis=0, block=16, signs=state.signs(RANDOM, CPU))
    assert torch.equal(y, quantise(v, "mxfp4", axis=0).bfloat16())


def test_delayed_scaling_uses_the_iterations_before() -> None:
    x = normal(64, 48)
    large = x * 64
    state = StepState(9)
    with use_step_state(state):
        assert torch.equal(quantise_operand(x, DELAYED, 0), quantise(x, "hifp8", scaling="current"))
        own = quantise(large, "hifp8", scaling="current")
        assert torch.equal(quantise_operand(large, DELAYED, 0), own)
        state.finish()
        before: dict[str, Any] = {"scaling": "current", "amax": finite_amax(large)}
        assert torch.equal(quantise_operand(x, DELAYED, 0), quantise(x, "hifp8", **before))
        assert state.record(DELAYED) == {"amax": float(finite_amax(large))}
        state.finish()
        quantise_operand(x, DELAYED, 0)
        state.finish()
        assert state.amax(DELAYED) == finite_amax(x)


def test_neither_a_forward_copy_nor_an_evaluation_enters_the_history() -> None:
    state = StepState(9)
    copy = replace(DELAYED, reuse=True)
    with use_step_state(state):
        quantise_operand(normal(32, 32), DELAYED, 0)
        state.finish()
        amax = state.amax(DELAYED)
        quantise_operand(normal(32, 32) * 100, copy, 0)
        state.updates_histories = False
        quantise_operand(normal(32, 32) * 100, DELAYED, 0)
        state.finish()
    assert state.amax(DELAYED) == amax


def test_a_clipped_gradient_uses_the_delayed_scale() -> None:
    state = StepState(9)
    operand = replace(DELAYED, clip_gradient=True)
    x = torch.tensor([[1.0, -30000.0, 3.0]])
    gradient = torch.ones_like(x)
    with use_step_state(state):
        assert torch.equal(clipped(gradient, x, operand, -1), gradient)
        quantise_operand(x / 30000, operand, -1)
        state.finish()
        assert clipped(gradient, x, operand, -1).tolist() == [[1.0, 0.0, 1.0]]
        assert torch.equal(clipped(gradient, x, DELAYED, -1), gradient)


def test_a_window_that_changes_begins_anew() -> None:
    state = StepState(9)
    longer = replace(DELAYED, window=5)
    with use_step_state(state):
        quantise_operand(normal(32, 32), DELAYED, 0)
        state.finish()
        assert state.amax(DELAYED) is not None
        assert state.amax(longer) is None
        quantise_operand(normal(32, 32), longer, 0)
    assert state.histories[STREAM].window == 5


def test_the_state_continues_where_it_was_saved() -> None:
    state = StepState(9)
    with use_step_state(state):
        for size in (1.0, 5.0, 2.0):
            quantise_operand(normal(32, 32) * size, DELAYED, 0)
            state.finish()
    saved = json.loads(json.dumps(state.state_dict()))
    again = StepState(9)
    again.load_state_dict(saved, CPU)
    for each in (state, again):
        with use_step_state(each):
            quantise_operand(normal(32, 32) * 0.5, DELAYED, 0)
        each.finish()
    assert again.amax(DELAYED) == state.amax(DELAYED)
    assert again.state_dict() == state.state_dict()


def test_an_ordinary_operand_needs_no_moment_and_adds_nothing() -> None:
    plain = replace(resolve("mxfp4_e2m1"), axis=Axis.TOKENS)
    x = normal(32, 32)
    assert torch.equal(quantise_operand(x, plain, -1), quantise(x, "mxfp4"))
    assert StepState(1).record(plain) == {}


def test_without_a_training_there_are_no_numbers() -> None:
    with pytest.raises(RuntimeError, match="random numbers and delayed scales need a step state"):
        current_state()
    with use_step_state(StepState(1)) as outer:
        with use_step_state(StepState(2)) as inner:
            assert current_state() is inner
        assert current_state() is outer


def largest_of(*ranks: dict[str, float]) -> dict[str, float]:
    return {name: max(rank.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank}


def observed(*tensors: torch.Tensor) -> StepState:
    state = StepState(9)
    with use_step_state(state):
        for x in tensors:
            quantise_operand(x, DELAYED, 0)
    return state


def running(state: StepState) -> dict[str, float]:
    """What the state passes to the merging function."""
    passed: list[dict[str, float]] = []
    deepcopy(state).finish(merge=lambda own: passed.append(own) or own)
    return passed[0]


def test_two_ranks_have_the_history_of_one_that_sees_both_tensors() -> None:
    """bfloat16 amaxes are float32 numbers, which a Python float holds exactly."""
    small, large = normal(32, 32), normal(32, 32) * 40
    one, ranks = observed(small, large), [observed(small), observed(large)]
    parts = [running(rank) for rank in ranks]
    assert parts[0] != parts[1]
    one.finish()
    for rank in ranks:
        rank.finish(merge=lambda own: largest_of(*parts))
        assert rank.state_dict() == one.state_dict()
        assert rank.amax(DELAYED) == finite_amax(large)


def test_a_rank_whose_expert_had_no_token_gets_the_amax_of_the_others() -> None:
    idle, busy = observed(normal(32, 32)[:0]), observed(normal(32, 32))
    assert running(idle) == {}
    idle.finish(merge=lambda own: largest_of(own, running(busy)))
    assert idle.amax(DELAYED) == finite_amax(normal(32, 32))
    alone = observed(normal(32, 32)[:0])
    alone.finish()
    assert alone.amax(DELAYED) is None


def test_streams_of_other_ranks_alone_are_left_out() -> None:
    """A stage of a pipeline keeps the histories of its own layers."""
    state = observed(normal(32, 32))
    state.finish(merge=lambda own: {**own, "layer 7 fc1 linear.fprop.x": 3.0})
    assert list(state.histories) == [STREAM]


def test_an_iteration_that_is_not_kept_is_not_merged() -> None:
    state = observed(normal(32, 32))

    def never(own: dict[str, float]) -> dict[str, float]:
        raise AssertionError

    state.finish(keep=False, merge=never)
    assert state.amax(DELAYED) is None


def test_a_recomputed_forward_pass_repeats_the_numbers_of_its_restored_position() -> None:
    """As in a pipeline: the backward pass of micro-batch 0, with its recomputation, follows the forward of 1."""
    x = normal(64, 48, dtype=torch.float32).requires_grad_()
    state = StepState(9)
    outputs: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        outputs.append(quantise_operand(x.detach(), STOCHASTIC, 0))
        return x * outputs[-1]

    with use_step_state(state):
        state.begin(3, 0)
        y = checkpoint(layer, x, use_reentrant=False)
        state.begin(3, 1)
        layer(x)
        state.begin(3, 0)
        y.sum().backward()
    assert (state.iteration, state.micro_batch) == (3, 0)
    forward, other, again = outputs
    assert torch.equal(again, forward)
    assert not torch.equal(other, forward)

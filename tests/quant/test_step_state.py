"""What random numbers and delayed scales follow from."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from quantexp.formats import Hadamard, Rounding, Scaling, finite_amax, hadamard, quantise
from quantexp.quant.operand import clipped, held
from quantexp.quant.slots import Operand
from quantexp.quant.step_state import Moment, current, during, seed_of

CPU = torch.device("cpu")
STREAM = "layer 0 fc1 linear.wgrad.g"
STOCHASTIC = Operand("mxfp4_e2m1", "tokens", 32, rounding=Rounding.STOCHASTIC, stream=STREAM)
DELAYED = Operand(
    "hifp8",
    "tokens",
    rounding=Rounding.AWAY,
    scaling=Scaling.DELAYED,
    saturate=True,
    amax_target=15.0,
    window=2,
    stream=STREAM,
)
RANDOM = Operand(
    "mxfp4_e2m1",
    "tokens",
    32,
    rounding=Rounding.EVEN,
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
    moment = Moment(1)
    moment.begin(3, 5)
    assert moment.offset == 3 * 2**32 + 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_stochastic_operand_is_quantised_with_its_seed_and_offset(dtype: torch.dtype) -> None:
    x = normal(64, 48, dtype=dtype)
    moment = Moment(9, iteration=2, micro_batch=1)
    with during(moment):
        y = held(x, STOCHASTIC, 0)
    draw = {"seed": seed_of(9, STREAM), "offset": moment.offset}
    assert moment.draw(STOCHASTIC) == draw
    assert torch.equal(y, quantise(x, "mxfp4", axis=0, rounding="stochastic", **draw))
    assert y.dtype == dtype


def test_each_micro_batch_has_numbers_of_its_own_and_repeats_them() -> None:
    x = normal(64, 48)
    moment = Moment(9)
    with during(moment):
        moment.begin(1, 0)
        first = held(x, STOCHASTIC, 0)
        moment.begin(1, 1)
        other = held(x, STOCHASTIC, 0)
        moment.begin(1, 0)
        assert torch.equal(held(x, STOCHASTIC, 0), first)
    assert not torch.equal(first, other)


def test_a_weight_that_is_quantised_once_a_step_has_the_first_micro_batchs_numbers() -> None:
    """Of any process, and so for captures, which tell seed and offset."""
    weight = Operand(**{**STOCHASTIC.__dict__, "weight": True})
    signed = Operand(**{**RANDOM.__dict__, "weight": True, "rounding": Rounding.STOCHASTIC})
    for once, operand, offset in (
        (True, weight, 3 << 32),
        (False, weight, (3 << 32) + 5),
        (True, STOCHASTIC, (3 << 32) + 5),
        (True, signed, (3 << 32) + 5),
    ):
        moment = Moment(9, weights_once=once)
        moment.begin(3, 5)
        assert moment.record(operand)["offset"] == moment.draw(operand)["offset"] == offset


def test_both_operands_of_a_product_have_the_same_signs() -> None:
    moment = Moment(9)
    right = Operand(**{**RANDOM.__dict__, "left": False, "stream": "layer 0 fc1 linear.wgrad.x"})
    signs = moment.signs(RANDOM, CPU)
    assert signs is not None
    assert signs.shape == (16,)
    assert torch.equal(signs, moment.signs(right, CPU))
    assert moment.signs(STOCHASTIC, CPU) is None
    moment.begin(1, 1)
    assert not torch.equal(signs, moment.signs(RANDOM, CPU))


def test_a_transformed_operand_is_the_transform_on_the_grid() -> None:
    x = normal(64, 48)
    moment = Moment(9)
    with during(moment):
        y = held(x, RANDOM, 0)
    v = hadamard(x, axis=0, block=16, signs=moment.signs(RANDOM, CPU))
    assert torch.equal(y, quantise(v, "mxfp4", axis=0).bfloat16())


def test_delayed_scaling_uses_the_iterations_before() -> None:
    x = normal(64, 48)
    large = x * 64
    moment = Moment(9)
    with during(moment):
        assert torch.equal(held(x, DELAYED, 0), quantise(x, "hifp8", scaling="current"))
        own = quantise(large, "hifp8", scaling="current")
        assert torch.equal(held(large, DELAYED, 0), own)
        moment.finish()
        before = {"scaling": "current", "amax": finite_amax(large)}
        assert torch.equal(held(x, DELAYED, 0), quantise(x, "hifp8", **before))
        assert moment.record(DELAYED) == {"amax": float(finite_amax(large))}
        moment.finish()
        held(x, DELAYED, 0)
        moment.finish()
        assert moment.amax(DELAYED) == finite_amax(x)


def test_neither_a_forward_copy_nor_an_evaluation_enters_the_history() -> None:
    moment = Moment(9)
    copy = Operand(**{**DELAYED.__dict__, "reuse": True})
    with during(moment):
        held(normal(32, 32), DELAYED, 0)
        moment.finish()
        amax = moment.amax(DELAYED)
        held(normal(32, 32) * 100, copy, 0)
        moment.observing = False
        held(normal(32, 32) * 100, DELAYED, 0)
        moment.finish()
    assert moment.amax(DELAYED) == amax


def test_a_clipped_gradient_knows_the_delayed_scale() -> None:
    moment = Moment(9)
    operand = Operand(**{**DELAYED.__dict__, "clip_gradient": True})
    x = torch.tensor([[1.0, -30000.0, 3.0]])
    gradient = torch.ones_like(x)
    with during(moment):
        assert torch.equal(clipped(gradient, x, operand, -1), gradient)
        held(x / 30000, operand, -1)
        moment.finish()
        assert clipped(gradient, x, operand, -1).tolist() == [[1.0, 0.0, 1.0]]
        assert torch.equal(clipped(gradient, x, DELAYED, -1), gradient)


def test_a_window_that_changes_begins_anew() -> None:
    moment = Moment(9)
    longer = Operand(**{**DELAYED.__dict__, "window": 5})
    with during(moment):
        held(normal(32, 32), DELAYED, 0)
        moment.finish()
        assert moment.amax(DELAYED) is not None
        assert moment.amax(longer) is None
        held(normal(32, 32), longer, 0)
    assert moment.histories[STREAM].window == 5


def test_the_state_continues_where_it_was_saved() -> None:
    moment = Moment(9)
    with during(moment):
        for size in (1.0, 5.0, 2.0):
            held(normal(32, 32) * size, DELAYED, 0)
            moment.finish()
    saved = json.loads(json.dumps(moment.state_dict()))
    again = Moment(9)
    again.load_state_dict(saved, CPU)
    for each in (moment, again):
        with during(each):
            held(normal(32, 32) * 0.5, DELAYED, 0)
        each.finish()
    assert again.amax(DELAYED) == moment.amax(DELAYED)
    assert again.state_dict() == moment.state_dict()


def test_an_ordinary_operand_needs_no_moment_and_adds_nothing() -> None:
    plain = Operand("mxfp4_e2m1", "tokens", 32, rounding=Rounding.EVEN)
    x = normal(32, 32)
    assert torch.equal(held(x, plain, -1), quantise(x, "mxfp4"))
    assert Moment(1).record(plain) == {}


def test_without_a_training_there_are_no_numbers() -> None:
    with pytest.raises(RuntimeError, match="no training is at work: random numbers and delayed"):
        current()
    with during(Moment(1)) as outer:
        with during(Moment(2)) as inner:
            assert current() is inner
        assert current() is outer

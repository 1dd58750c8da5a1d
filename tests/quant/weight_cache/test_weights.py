"""Quantised weights serve a whole step, are bit-identical to those of each product, and are never stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import quantise
from quantexp.quant import multiply
from quantexp.quant.hooks import hook_operands
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.sites import FPROP_W
from quantexp.quant.step_state import StepState, seed_of, use_step_state
from quantexp.quant.weight_cache import weights
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.schema import (
    LinearDgrad,
    LinearFprop,
    LinearSite,
    ModelConfig,
    QuantConfig,
    Slot,
)

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=64,
    ffn_hidden_size=48,
    num_attention_heads=1,
    num_query_groups=1,
    head_dim=64,
)


def declared(fmt: str, dgrad: Slot | None = None, **options: object) -> ModulePrecision:
    linear = LinearSite(format=fmt, dgrad=LinearDgrad(w=dgrad or Slot()), **options)  # type: ignore[arg-type]
    return precision_map(MODEL, QuantConfig(linear=linear))[ModuleId(0, "fc1")]


@pytest.fixture
def w() -> Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def creations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per created copy of a weight."""
    creations: list[int] = []

    def counted(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(x: Tensor, op: object, axis: int, *rest: object, **out: object) -> Tensor:
            creations.append(axis)
            return of(x, op, axis, *rest, **out)

        return count

    def by_two(x: Tensor, first: Any, second: Any, axes: Any, *rest: Any) -> object:
        creations.append(sum(axes))
        return both(x, first, second, axes, *rest)

    both = multiply.quantise_pair
    monkeypatch.setattr(weights, "quantise_operand", counted(multiply.quantise_operand))
    monkeypatch.setattr(weights, "quantise_pair", by_two)
    return creations


@pytest.mark.parametrize("dgrad_follows", [True, False])
def test_micro_batches_of_a_step_share_rows_and_columns(
    w: Tensor, creations: list[int], dgrad_follows: bool
) -> None:
    copies, precision = WeightCopies(), declared("mxfp8", scale_rule="rceil")
    rows, columns = (quantise(w, "mxfp8", axis=axis, scale_rule="rceil") for axis in (-1, 0))
    with copies.step(several=True):
        for _ in range(3):
            assert torch.equal(copies.for_fprop(precision, w, dgrad_follows), rows)
            assert torch.equal(copies.for_dgrad(precision, w), columns)
        assert len(creations) == (1 if dgrad_follows else 2)
        assert copies.num_bytes() == 2 * w.nbytes
    assert copies.num_bytes() == 0
    with copies.step(several=True):
        copies.for_fprop(precision, w, dgrad_follows)
    assert len(creations) == (2 if dgrad_follows else 3)


def test_a_format_without_blocks_has_one_copy_for_both_products(
    w: Tensor, creations: list[int]
) -> None:
    copies, precision = WeightCopies(), declared("hifp8")
    for several in (True, False):
        with copies.step(several):
            forward = copies.for_fprop(precision, w, dgrad_follows=True)
            assert copies.num_bytes() == w.nbytes
            assert copies.for_dgrad(precision, w) is forward
            assert copies.num_bytes() == (w.nbytes if several else 0)
    assert torch.equal(forward, quantise(w, "hifp8", scaling="current"))
    assert len(creations) == 2, "once a step"


def test_square_blocks_have_one_copy_for_both_products(w: Tensor, creations: list[int]) -> None:
    square = {
        "tile": {"element": "e2m1", "block": [16, 16], "scale": "e4m3", "tensor_scale": "fp32"}
    }
    slot = Slot(format="tile")
    linear = LinearSite(fprop=LinearFprop(w=slot), dgrad=LinearDgrad(w=slot))
    quant = QuantConfig(linear=linear, formats=square)
    precision = precision_map(MODEL, quant)[ModuleId(0, "fc1")]
    copies = WeightCopies()
    for several in (True, False):
        with copies.step(several):
            forward = copies.for_fprop(precision, w, dgrad_follows=True)
            assert copies.for_dgrad(precision, w) is forward
    assert len(creations) == 2, "once a step"
    assert torch.equal(forward, quantise(w, precision.spec(FPROP_W)))


def test_one_micro_batch_keeps_the_copy_that_comes_with_the_forwards_until_dgrad(
    w: Tensor, creations: list[int]
) -> None:
    copies, precision = WeightCopies(), declared("mxfp8")
    with copies.step(several=False):
        copies.for_fprop(precision, w, dgrad_follows=True)
        assert copies.num_bytes() == w.nbytes
        columns = copies.for_dgrad(precision, w)
        assert copies.num_bytes() == 0
    assert len(creations) == 1
    assert torch.equal(columns, quantise(w, "mxfp8", axis=0, scale_rule="rceil"))


def test_one_micro_batch_keeps_no_copy_that_needs_its_own_read(w: Tensor) -> None:
    copies, precision = WeightCopies(), declared("mxfp8", Slot(format="mxfp4"))
    with copies.step(several=False):
        copies.for_fprop(precision, w, dgrad_follows=True)
        assert copies.num_bytes() == 0
        assert torch.equal(copies.for_dgrad(precision, w), quantise(w, "mxfp4", axis=0))
        assert copies.num_bytes() == 0


def test_a_recomputed_forward_reuses_the_first_ones_copy(w: Tensor, creations: list[int]) -> None:
    copies, precision = WeightCopies(), declared("mxfp8")
    with copies.step(several=False, recomputed=True):
        first = copies.for_fprop(precision, w, dgrad_follows=False)
        assert copies.for_fprop(precision, w, dgrad_follows=True) is first
        copies.for_dgrad(precision, w)
        assert copies.num_bytes() == w.nbytes
    assert len(creations) == 2


def test_a_forward_copy_used_again_is_that_copy(w: Tensor) -> None:
    copies, precision = WeightCopies(), declared("mxfp4", Slot(format="reuse"))
    with copies.step(several=True):
        forward = copies.for_fprop(precision, w, dgrad_follows=False)
        assert copies.for_dgrad(precision, w) is forward
    assert torch.equal(copies.for_dgrad(precision, w), forward), "made again, along the same axis"


def test_slots_that_rules_change_have_copies_of_their_own(w: Tensor) -> None:
    """The key of a copy is its declaration, not only its position."""
    copies = WeightCopies()
    with copies.step(several=True):
        eight = copies.for_fprop(declared("mxfp8"), w, dgrad_follows=True)
        four = copies.for_fprop(declared("mxfp4"), w, dgrad_follows=True)
        plain = copies.for_fprop(declared("bf16"), w, dgrad_follows=True)
    assert torch.equal(eight, quantise(w, "mxfp8", scale_rule="rceil"))
    assert torch.equal(four, quantise(w, "mxfp4"))
    assert plain is w


def test_outside_of_a_step_no_copy_is_kept(w: Tensor, creations: list[int]) -> None:
    copies, precision = WeightCopies(), declared("mxfp8")
    for _ in range(2):
        copies.for_fprop(precision, w, dgrad_follows=True)
        copies.for_dgrad(precision, w)
    assert len(creations) == 4
    assert copies.num_bytes() == 0


def test_a_step_draws_once_with_the_first_micro_batchs_numbers(w: Tensor) -> None:
    copies, precision = WeightCopies(), declared("mxfp4", rounding="stochastic")
    state = StepState(9, weights_once=True)
    drawn = []
    with use_step_state(state), copies.step(several=True):
        for micro_batch in (3, 4):
            state.begin(2, micro_batch)
            drawn.append(copies.for_fprop(precision, w, dgrad_follows=True))
            columns = copies.for_dgrad(precision, w)
    assert drawn[0] is drawn[1]
    for copy, axis, product in ((drawn[0], -1, "fprop"), (columns, 0, "dgrad")):
        seed = seed_of(9, f"layer 0 fc1 linear.{product}.w")
        options = {"rounding": "stochastic", "seed": seed, "offset": 2 << 32}
        assert torch.equal(copy, quantise(w, "mxfp4", axis=axis, **options))  # type: ignore[arg-type]


def test_random_signs_go_with_their_micro_batch(w: Tensor) -> None:
    copies, precision = WeightCopies(), declared("mxfp4", hadamard="random")
    state = StepState(9, weights_once=True)
    with use_step_state(state), copies.step(several=True):
        forwards = []
        for micro_batch in (0, 1):
            state.begin(1, micro_batch)
            forwards.append(copies.for_fprop(precision, w, dgrad_follows=True))
        assert copies.num_bytes() == 0
    assert not torch.equal(*forwards)


@pytest.mark.parametrize("product", ["fprop", "dgrad"])
def test_a_weight_that_changed_after_it_was_quantised_is_refused(w: Tensor, product: str) -> None:
    copies, precision = WeightCopies(), declared("mxfp8")
    with copies.step(several=True):
        copies.for_fprop(precision, w, dgrad_follows=True)
        w.mul_(2)
        words = "the weight of layer 0 fc1 changed within a step, after it was quantised"
        again = {
            "fprop": lambda: copies.for_fprop(precision, w, dgrad_follows=True),
            "dgrad": lambda: copies.for_dgrad(precision, w),
        }
        with pytest.raises(RuntimeError, match=words):
            again[product]()
        w.div_(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_change_that_torch_does_not_count_is_detected_when_the_step_ends(
    w: Tensor, dtype: torch.dtype
) -> None:
    """Megatron's optimizer writes through `.data`: here one element in three, each by one part in a hundred."""
    copies, precision, other = WeightCopies(), declared("mxfp8"), declared("mxfp4")
    w = w.to(dtype)

    def step(change: Tensor) -> None:
        with copies.step(several=True):
            copies.for_fprop(precision, w, dgrad_follows=True)
            copies.for_fprop(other, w, dgrad_follows=True)
            w.data.mul_(change)

    step(torch.ones_like(w))
    change = torch.where(torch.arange(w.numel()).view(w.shape) % 3 == 0, 1.01, 1.0).to(dtype)
    with pytest.raises(RuntimeError, match="the weight of layer 0 fc1 changed within a step"):
        step(change)
    assert copies.num_bytes() == 0
    step(torch.ones_like(w))


def test_nan_in_a_weight_is_no_change(w: Tensor) -> None:
    copies, precision = WeightCopies(), declared("mxfp8")
    w[0] = torch.nan
    with copies.step(several=True):
        copies.for_fprop(precision, w, dgrad_follows=True)


@pytest.mark.parametrize("fmt", ["mxfp8", "hifp8"])
@pytest.mark.parametrize("several", [True, False])
def test_steps_write_to_the_same_memory_and_the_copies_stay_right(fmt: str, several: bool) -> None:
    """Weights of two layers at once; a tensor that a hook saw is never overwritten."""
    copies, precision = WeightCopies(), declared(fmt)
    other = ModulePrecision(ModuleId(1, "fc1"), precision.slots)
    generator = torch.Generator().manual_seed(1)
    places, hooked = [], []
    for step in range(3):
        pair = [torch.randn(96, 64, generator=generator).bfloat16() for _ in range(2)]
        with copies.step(several):
            expected, addresses = [], set[int]()
            for each, w in zip((precision, other), pair, strict=True):
                first, second = weights.weight_operands(each)
                rows = copies.for_fprop(each, w, dgrad_follows=True)
                assert torch.equal(rows, multiply.quantise_operand(w, first, -1))
                addresses.add(rows.data_ptr())
                expected.append(multiply.quantise_operand(w, second, 0))
            columns = [
                copies.for_dgrad(p, w) for p, w in zip((precision, other), pair, strict=True)
            ]
            assert all(torch.equal(*both) for both in zip(columns, expected, strict=True))
            places.append(addresses | {x.data_ptr() for x in columns})
            if step == 1:
                with hook_operands(lambda *_: None):
                    copy = copies.for_fprop(precision, pair[0], dgrad_follows=True)
                    hooked = [(copy, copy.clone())]
    assert places[0] == places[1]
    assert all(torch.equal(x, then) for x, then in hooked)

"""MX against other implementations over every value, and against rational arithmetic for hard cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.extras.verify.cases import hard_blocks
from quantexp.extras.verify.exact import Case, answer
from quantexp.extras.verify.gold import of_table, quantised
from quantexp.extras.verify.oracles import gfloat_oracle, ml_dtypes_oracle
from quantexp.extras.verify.rational import MX_ELEMENTS, SCALE_RULES
from quantexp.formats import quantise

from .tensors import as_numpy, assert_same, every_finite_value

all_formats = pytest.mark.parametrize("name", MX_ELEMENTS)
all_rules = pytest.mark.parametrize("rule", SCALE_RULES)
both_roundings = pytest.mark.parametrize("rounding", ["even", "away"])


def oracle(x: torch.Tensor, name: str, rule: str, rounding: str) -> np.ndarray:
    """Blocks along the last axis, x finite: ml_dtypes rounds to nearest even, gfloat away."""
    case = Case(
        name,
        as_numpy(x),
        str(x.dtype).removeprefix("torch."),
        options={"block": x.shape[-1], "scale_rule": rule, "rounding": rounding},
    )
    library = ml_dtypes_oracle if rounding == "even" else gfloat_oracle
    opinion = library.oracle().opinion(case, answer(case))
    assert opinion is not None
    return opinion.answer.values


@all_formats
@all_rules
@both_roundings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_agrees_with_the_oracle(
    name: str, rule: str, rounding: str, dtype: torch.dtype
) -> None:
    """Alone in its block, among neighbours in magnitude, and shuffled.

    Excluded: NaN and Inf, for which implementations differ and ours has its own tests.
    """
    values = every_finite_value(dtype)
    by_magnitude = values[values.abs().float().argsort(stable=True)]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    for x, block in (
        (values.view(-1, 1), 1),
        (by_magnitude.view(-1, 32), 32),
        (shuffled.view(-1, 32), 32),
    ):
        y = quantise(x, name, block=block, scale_rule=rule, rounding=rounding)
        assert y.dtype == dtype
        assert_same(y, oracle(x, name, rule, rounding))


def test_gfloat_and_ml_dtypes_agree_where_both_can_round() -> None:
    v = every_finite_value(torch.float16).abs().double().numpy()
    for element in gfloat_oracle.INFOS:
        by_gfloat = gfloat_oracle.rounded(element, v, True, "even")
        np.testing.assert_array_equal(by_gfloat, ml_dtypes_oracle.rounded(element, v, True))


@all_formats
@all_rules
@both_roundings
def test_hard_blocks_agree_with_rational_arithmetic(name: str, rule: str, rounding: str) -> None:
    blocks = hard_blocks(name, rule)[::16]
    expected = quantised(of_table(name, scale_rule=rule), blocks, rounding)
    y = quantise(torch.from_numpy(blocks), name, scale_rule=rule, rounding=rounding)
    assert_same(y, expected)


@all_formats
@all_rules
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_nan_or_inf_is_nan_as_a_whole_and_its_neighbours_are_not(
    name: str, rule: str, bad: float
) -> None:
    x = torch.linspace(-3, 3, 96)
    clean = quantise(x, name, scale_rule=rule)
    x[40] = bad
    y = quantise(x, name, scale_rule=rule)
    assert y[32:64].isnan().all()
    assert_same(torch.cat([y[:32], y[64:]]), torch.cat([clean[:32], clean[64:]]))


@all_formats
@all_rules
@both_roundings
def test_a_zero_block_keeps_its_zeros_and_their_signs(name: str, rule: str, rounding: str) -> None:
    x = torch.zeros(64)
    x[::3] = -0.0
    assert_same(quantise(x, name, scale_rule=rule, rounding=rounding), x)


@all_formats
def test_small_negative_values_become_negative_zero(name: str) -> None:
    y = quantise(torch.tensor([1.0, -1e-20, 1e-20]), name)
    assert_same(y, torch.tensor([1.0, -0.0, 0.0]))


@pytest.mark.parametrize("rule", ["rceil", "ceil", "even"])
def test_the_last_binade_may_come_out_infinite(rule: str) -> None:
    largest = torch.finfo(torch.float32).max
    assert quantise(torch.tensor([largest]), "mxfp8", scale_rule=rule).item() == float("inf")
    floor = quantise(torch.tensor([largest]), "mxfp8", scale_rule="floor").item()
    assert floor == 448.0 * 2.0**119


def test_a_value_beyond_fp16_becomes_inf_in_fp16() -> None:
    x = torch.tensor([65504.0], dtype=torch.float16)
    assert quantise(x, "mxfp8", scale_rule="rceil").item() == float("inf")
    assert quantise(x.float(), "mxfp8", scale_rule="rceil").item() == 65536.0


def test_a_block_may_have_any_power_of_two_of_elements() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    for block in (1, 2, 16, 64, 256, 1024):
        expected = quantised(of_table("mxfp4_e2m1", block=block), x.numpy(), "even")
        assert_same(quantise(x, "mxfp4", block=block), expected)

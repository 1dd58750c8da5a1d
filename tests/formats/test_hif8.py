"""HiFloat8 against en_dtypes over every value, and against rational arithmetic around every tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantexp.extras.verify.cases import hard_values
from quantexp.extras.verify.exact import Case, answer
from quantexp.extras.verify.gold import of_table, quantised
from quantexp.extras.verify.oracles import en_dtypes_oracle
from quantexp.formats import quantise

from .tensors import as_numpy, assert_same, every_value


def oracle(x: torch.Tensor, *, saturate: bool) -> np.ndarray:
    """en_dtypes makes values that are too large infinite; saturating replaces Inf by 32768."""
    dtype = str(x.dtype).removeprefix("torch.")
    case = Case("hifp8", as_numpy(x), dtype, options={"saturate": saturate})
    opinion = en_dtypes_oracle.oracle().opinion(case, answer(case))
    assert opinion is not None
    return opinion.answer.values


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_agrees_with_the_oracle(dtype: torch.dtype, saturate: bool) -> None:
    x = every_value(dtype)
    assert_same(quantise(x, "hifp8", saturate=saturate), oracle(x, saturate=saturate))


@pytest.mark.parametrize("saturate", [True, False])
def test_random_float32_bits_agree_with_the_oracle(saturate: bool) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(3))
    x = bits.to(torch.int32).view(torch.float32)
    near = torch.randn(1 << 20, generator=torch.Generator().manual_seed(4)).exp2_().pow_(5)
    for values in (x, near):
        y = quantise(values, "hifp8", saturate=saturate)
        assert_same(y, oracle(values, saturate=saturate))


@pytest.mark.parametrize("saturate", [True, False])
def test_ties_and_their_float32_neighbours_agree_with_rational_arithmetic(saturate: bool) -> None:
    x = hard_values("hif8")
    expected = quantised(of_table("hifp8", saturate=saturate), x[None], "away")[0]
    assert_same(quantise(torch.from_numpy(x), "hifp8", saturate=saturate), expected)


def test_ties_to_even_go_to_the_even_multiple_of_the_step() -> None:
    x = torch.tensor([1.0625, 1.1875, -1.0625, 4.25, 4.75, 3 * 2.0**-18, 2.0**-23, 40960.0])
    even = torch.tensor([1.0, 1.25, -1.0, 4.0, 5.0, 2.0**-16, 0.0, 32768.0])
    away = torch.tensor([1.125, 1.25, -1.125, 4.5, 5.0, 2.0**-16, 2.0**-22, 32768.0])
    assert_same(quantise(x, "hifp8", rounding="even"), even)
    assert_same(quantise(x, "hifp8"), away)


def test_there_is_no_negative_zero() -> None:
    x = torch.tensor([-0.0, -(2.0**-24), -(2.0**-149)])
    assert_same(quantise(x, "hifp8"), torch.zeros(3))


@pytest.mark.parametrize(("saturate", "largest"), [(True, 32768.0), (False, math.inf)])
def test_values_that_are_too_large_saturate_or_become_infinite(
    saturate: bool, largest: float
) -> None:
    x = torch.tensor([40959.0, 40960.0, -40960.0, math.inf, -math.inf])
    expected = torch.tensor([32768.0, largest, -largest, largest, -largest])
    assert_same(quantise(x, "hifp8", saturate=saturate), expected)


def test_nan_stays_and_affects_no_other_element() -> None:
    y = quantise(torch.tensor([1.0, math.nan, 2.0]), "hifp8", scaling="current")
    assert_same(y, torch.tensor([1.0, math.nan, 2.0]))

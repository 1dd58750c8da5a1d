"""FP8 against casts of ml_dtypes over every value, and against rational arithmetic around every tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantexp.extras.verify.cases import hard_values
from quantexp.extras.verify.gold import of_table, quantised
from quantexp.extras.verify.oracles import ml_dtypes_oracle, torch_oracle
from quantexp.extras.verify.rational import FP8_ELEMENTS
from quantexp.formats import FORMATS, finite_amax, quantise

from .tensors import as_numpy, assert_same, every_value

all_fp8 = pytest.mark.parametrize("name", FP8_ELEMENTS)
both = pytest.mark.parametrize("saturate", [True, False])


def cast(v: np.ndarray, name: str, *, saturate: bool) -> np.ndarray:
    """Float32 values by ml_dtypes' casts."""
    q = ml_dtypes_oracle.rounded(name.removeprefix("fp8_"), np.abs(v), saturate)
    with np.errstate(invalid="ignore"):  # the sign of a NaN
        return np.copysign(q, v).astype(np.float32)


@all_fp8
@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_agrees_with_the_oracle(
    name: str, dtype: torch.dtype, saturate: bool
) -> None:
    x = every_value(dtype)
    y = quantise(x, name, scaling="none", saturate=saturate)
    assert_same(y, cast(as_numpy(x), name, saturate=saturate))


@all_fp8
@both
def test_random_float32_bits_agree_with_the_oracle(name: str, saturate: bool) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(3))
    x = bits.to(torch.int32).view(torch.float32)
    near = torch.randn(1 << 20, generator=torch.Generator().manual_seed(4)).exp2_().pow_(5)
    for values in (x, near):
        y = quantise(values, name, scaling="none", saturate=saturate)
        assert_same(y, cast(values.numpy(), name, saturate=saturate))


@all_fp8
@both
@pytest.mark.parametrize("ties", ["even", "away", "zero"])
def test_ties_and_their_float32_neighbours_agree_with_rational_arithmetic(
    name: str, ties: str, saturate: bool
) -> None:
    saturate |= ties == "zero"
    x = hard_values(name.removeprefix("fp8_"))
    gold = of_table(name, saturate=saturate, scale="none")
    y = quantise(torch.from_numpy(x), name, scaling="none", rounding=ties, saturate=saturate)
    assert_same(y, quantised(gold, x[None], ties)[0])


@all_fp8
def test_saturating_torchs_own_cast_agrees(name: str) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(5)).mul(9).exp()
    expected = torch_oracle.rounded(name.removeprefix("fp8_"), x.numpy(), True)
    assert_same(quantise(x, name, scaling="none"), expected)


@all_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_exact_scale_rounds_three_times_in_float32_and_once_to_the_dtype(
    name: str, dtype: torch.dtype
) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(6)).mul(0.01).to(dtype)
    largest = FORMATS[name].element.max
    scale = np.float32(largest / np.float64(finite_amax(x).item()))
    rounded = cast(as_numpy(x) * scale, name, saturate=True)
    assert_same(quantise(x, name), torch.from_numpy(rounded / scale).to(dtype))


@all_fp8
def test_the_largest_element_stays_unchanged(name: str) -> None:
    x = torch.tensor([3.140625, 0.001], dtype=torch.bfloat16)
    assert quantise(x, name)[0] == 3.140625


@all_fp8
def test_current_scaling_is_a_power_of_two(name: str) -> None:
    """Scaled by hand: amax 3 is scaled to at most the largest value."""
    x = torch.tensor([3.0, 0.3, -1e-6])
    scale = {"fp8_e4m3": 2.0**7, "fp8_e5m2": 2.0**14}[name]
    expected = quantise(x * scale, name, scaling="none") / scale
    assert_same(quantise(x, name, scaling="current"), expected)


@all_fp8
def test_specials_keep_their_place_and_signs(name: str) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0])
    largest = FORMATS[name].element.max
    assert_same(
        quantise(x, name, scaling="none"), torch.tensor([math.nan, largest, -largest, -0.0, 1.0])
    )
    overflow = math.inf if name == "fp8_e5m2" else math.nan
    loose = quantise(x, name, scaling="none", saturate=False)
    assert_same(loose, torch.tensor([math.nan, overflow, -overflow, -0.0, 1.0]))

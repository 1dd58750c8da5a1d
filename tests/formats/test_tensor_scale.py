"""The scale of a HiFloat8 tensor, at all magnitudes of amax."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.extras.verify.declared_values import on_grid
from quantexp.extras.verify.gold import of_table, quantised
from quantexp.formats import finite_amax, quantise, resolve
from quantexp.formats.families import tensor_scale
from tests.fake_gpu import copies

from .tensors import assert_same


def scale_of(amax: float, scaling: str, target: float | None = None) -> float:
    options = resolve("hifp8", scaling=scaling, amax_target=target)
    scale = tensor_scale(torch.tensor([amax]), options, None)
    assert scale is not None
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    return float(scale)


@pytest.mark.parametrize("target", [15.0, 224.0, 1.0, 0.3, 32768.0])
def test_current_is_the_largest_power_of_two_that_stays_within_the_target(target: float) -> None:
    for exponent in (-100, -64, -1, 0, 3, 4, 100, 120):
        for point in (1.0, target / 2.0 ** gold.floor_log2(Fraction(target)), 1.5):
            centre = np.float32(point * 2.0**exponent)
            for amax in (
                centre,
                np.nextafter(centre, np.float32(0)),
                np.nextafter(centre, np.float32(2e38)),
            ):
                scale = Fraction(scale_of(float(amax), "current", target))
                assert Fraction(2) ** gold.floor_log2(scale) == scale
                assert Fraction(float(amax)) * scale <= Fraction(target)
                assert Fraction(float(amax)) * scale * 2 > Fraction(target)


@pytest.mark.parametrize("scaling", ["current", "exact"])
def test_a_scale_beyond_float32_is_clamped_to_its_normal_powers_of_two(scaling: str) -> None:
    assert scale_of(2.0**-149, scaling) == 2.0**127
    assert scale_of(3e38, scaling, 1e-30) == 2.0**-126


def test_exact_is_the_quotient_in_float32() -> None:
    assert scale_of(7.3, "exact") == np.float32(15.0 / np.float64(np.float32(7.3)))


@pytest.mark.parametrize("scaling", ["current", "exact"])
@pytest.mark.parametrize("values", [[0.0, -0.0], [math.nan, math.inf], []])
def test_without_a_positive_finite_amax_the_scale_is_one(scaling: str, values: list[Any]) -> None:
    scale = tensor_scale(torch.tensor(values), resolve("hifp8", scaling=scaling), None)
    assert scale is not None
    assert scale.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_over_the_finite_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -6.0, math.nan], [math.inf, 2.0, -math.inf]], dtype=dtype)
    assert finite_amax(x).item() == 6.0
    assert finite_amax(x.t()[1:]).item() == 6.0
    assert finite_amax(x[:, 2]).item() == 0.0
    assert finite_amax(x[:0]).item() == 0.0
    largest = torch.finfo(dtype).max
    assert finite_amax(torch.tensor([largest, math.inf], dtype=dtype)).item() == largest


def test_two_shards_with_the_reduced_amax_are_quantised_as_the_whole() -> None:
    x = torch.randn(2, 500, generator=torch.Generator().manual_seed(9))
    x[1] *= 100
    amax = torch.maximum(finite_amax(x[0]), finite_amax(x[1]))
    for scaling in ("current", "exact"):
        whole = quantise(x, "hifp8", scaling=scaling)
        shards = [quantise(part, "hifp8", scaling=scaling, amax=amax) for part in x]
        assert_same(torch.stack(shards), whole)
        assert (
            not torch.equal(quantise(x[0], "hifp8", scaling=scaling), whole[0])
            or scaling == "current"
        )


def test_an_amax_has_no_axes() -> None:
    with pytest.raises(ValueError, match=r"amax must be a 0-dim tensor, got shape \(1,\)"):
        quantise(torch.ones(3), "hifp8", scaling="current", amax=torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_values_are_rational_arithmetic_in_every_dtype(dtype: torch.dtype) -> None:
    """s is a power of two, so x s, its rounding and the division are exact, in 16 bits as well."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(10)).exp().mul(0.01).to(dtype)
    x[::2] *= -1
    scale = Fraction(scale_of(float(finite_amax(x)), "current"))
    element = of_table("hifp8").element
    expected = [
        float(Fraction(on_grid(element, Fraction(float(v)) * scale, "away")) / scale) for v in x
    ]
    assert_same(quantise(x, "hifp8", scaling="current"), np.array(expected, dtype=np.float32))


def test_exact_scaling_rounds_three_times_in_float32_and_once_to_the_dtype() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(11)).bfloat16()
    scale = np.float32(scale_of(float(finite_amax(x)), "exact"))
    products = x.float().numpy() * scale
    rounded = quantised(of_table("hifp8"), products[None], "away")[0]
    expected = torch.from_numpy(rounded / scale).bfloat16()
    assert_same(quantise(x, "hifp8", scaling="exact"), expected)


def test_infinity_saturates_before_the_scale_is_undone() -> None:
    x = torch.tensor([math.inf, 30.0])
    assert quantise(x, "hifp8", scaling="current").tolist() == [65536.0, 30.0]
    assert quantise(x, "hifp8", scaling="current", saturate=False).tolist() == [math.inf, 30.0]


@pytest.mark.parametrize("scaling", ["current", "exact"])
@pytest.mark.parametrize("fmt", ["hifp8", "fp8_e4m3", "nvfp4_e2m1"])
def test_on_a_gpu_no_scale_waits_for_the_device(fmt: str, scaling: str) -> None:
    def scale(device: torch.device) -> None:
        x, amax = torch.empty(8, 32, device=device), torch.empty((), device=device)
        assert tensor_scale(x, resolve(fmt, scaling=scaling), amax) is not None

    assert copies(scale) == []

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from quantexp.analysis.tensors.sample import OperandSample
from quantexp.capture.statistics.errors import quantisation_error
from quantexp.extras.requantise.exponent import (
    OFFSETS,
    Point,
    quantise_at_offset,
    study,
    study_points,
)
from quantexp.formats import finite_amax, get_format, quantise, resolve

from .conftest import normal

#: Format -> the type that casts to its elements, their largest exponent and value.
ELEMENTS = {
    "mxfp8_e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 7.5),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 28.0),
    "mxfp4_e2m1": (ml_dtypes.float4_e2m1fn, 2, 6.0),
}


def looked(x: torch.Tensor, dim: int = -1) -> OperandSample:
    return OperandSample(x, dim, finite_amax(x))


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_offset_gives_the_values_of_ml_dtypes(name: str) -> None:
    dtype, emax, largest = ELEMENTS[name]
    x = normal(16, 96, seed=2)
    blocks = x.double().numpy().reshape(16, 3, 32)
    floor = np.frexp(np.abs(blocks).max(-1, keepdims=True))[1] - 1 - emax
    for offset in OFFSETS:
        scale = 2.0 ** (floor + offset)
        clipped = np.clip(blocks / scale, -largest, largest).astype(np.float32)
        expected = (clipped.astype(dtype).astype(np.float64) * scale).reshape(16, 96)
        values, limits = quantise_at_offset(x, get_format(name), offset)
        assert np.array_equal(values.double().numpy(), expected)
        assert np.array_equal(limits.double().numpy().reshape(16, 3, 32)[..., :1], largest * scale)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("extent", [64, 40, 7])
def test_the_offset_nought_is_the_floor_rule(name: str, extent: int) -> None:
    x = normal(8, extent).float()
    x[3, 2], x[4, 1] = math.nan, math.inf
    values, _ = quantise_at_offset(x, get_format(name), 0)
    expected = quantise(x, name, scale_rule="floor")
    assert torch.equal(values.nan_to_num(77), expected.nan_to_num(77))
    (at_nought,) = study(looked(x), [Point(get_format(name), 0)])
    assert at_nought == quantisation_error(x, resolve(name, scale_rule="floor"), -1)


def test_blocks_may_lie_along_any_axis() -> None:
    x = normal(64, 3, 40).float()
    points = [Point(get_format("mxfp4"), d) for d in (-1, 0, 2)]
    along = list(study(looked(x, 0), points))
    assert along == list(study(looked(x.movedim(0, -1).contiguous(), -1), points))


def test_scales_stay_in_the_range_of_their_code() -> None:
    """2^-127 for tiny values whatever the offset below; 2^127 for huge ones."""
    fmt = get_format("mxfp8_e4m3")
    _, tiny = quantise_at_offset(torch.full((1, 32), 2.0**-120), fmt, -4)
    assert (tiny == 448 * 2.0**-127).all()
    _, huge = quantise_at_offset(torch.full((1, 32), 2.0**127), get_format("mxfp4"), 6)
    assert (huge == torch.inf).all()  # 6 times 2^127
    values, _ = quantise_at_offset(torch.full((1, 32), 2.0**127), get_format("mxfp4"), 6)
    assert (values == 2.0**127).all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_target_of_fp8_is_a_power_of_two_above_amax(name: str) -> None:
    dtype = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}[name]
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[name]
    x = normal(32, 64, seed=4)
    wide = x.double().numpy()
    for exponent in (-3, 0, 8, 17):
        scale = 2.0 ** math.floor(exponent - math.log2(np.abs(wide).max()))
        clipped = np.clip(wide * scale, -largest, largest).astype(np.float32)
        error = clipped.astype(dtype).astype(np.float64) / scale - wide
        (point,) = study(looked(x), [Point(get_format(name), exponent)])
        # 1e-9: sums of 2048 float64 values in another order.
        expected = 10 * math.log10((wide**2).sum() / (error**2).sum())
        assert math.isclose(point.sqnr_db, expected, rel_tol=1e-9)
        assert point.saturated_share == (np.abs(wide * scale) > largest).mean()


def test_a_target_of_nvfp4_moves_its_tensor_scale() -> None:
    """By hand in numpy, with the scale 2^k, the smallest with amax / 2^k at most 2^t."""
    x = normal(32, 64, seed=6)
    wide = x.double().numpy().reshape(32, 4, 16)
    amax = np.abs(wide).max()
    for exponent in (-2, 5, 11, 14):
        t = 2.0 ** math.ceil(math.log2(amax) - exponent)
        ratio = np.abs(wide).max(-1, keepdims=True) / 6 / t
        scale = np.clip(ratio, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * t
        codes = np.clip(wide / scale, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        dequantised = torch.from_numpy(codes.astype(np.float64) * scale).to(torch.bfloat16)
        error = dequantised.double().numpy() - wide
        expected = 10 * math.log10((wide**2).sum() / (error**2).sum())
        (point,) = study(looked(x), [Point(get_format("nvfp4"), exponent)])
        # 0.01 dB: amax / 6 is rounded to float32 before it is rounded to e4m3.
        assert math.isclose(point.sqnr_db, expected, abs_tol=0.01)


def test_points_reach_from_far_below_a_format_s_largest_value_to_beyond_it() -> None:
    points = study_points([get_format(n) for n in ("mxfp4", "fp8_e4m3", "nvfp4", "hifp8")])
    reach = {
        name: [p.exponent for p in points if p.format.name == name]
        for name in ("mxfp4_e2m1", "fp8_e4m3", "nvfp4_e2m1", "hifp8")
    }
    assert reach == {
        "mxfp4_e2m1": [*range(-4, 7)],
        "fp8_e4m3": [*range(-6, 12)],  # 448 is below 2^9
        "nvfp4_e2m1": [*range(-3, 15)],  # 2688 is below 2^12
        "hifp8": [*range(1, 19)],
    }

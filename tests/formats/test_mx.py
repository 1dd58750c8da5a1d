"""MX against other implementations over every value, and rational arithmetic where it is hard."""

from __future__ import annotations

import itertools

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from quantexp.formats import FORMATS, quantise

from . import gold
from .tensors import as_numpy, assert_same, every_finite_value

ML_DTYPES = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}
GFLOAT_INFOS = {
    "mxfp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "mxfp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "mxfp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "mxfp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "mxfp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
}
all_formats = pytest.mark.parametrize("name", gold.MX_ELEMENTS)
all_rules = pytest.mark.parametrize("rule", gold.SCALE_RULES)
both_roundings = pytest.mark.parametrize("rounding", ["even", "away"])


def with_oracle_element(name: str, v: np.ndarray, rounding: str) -> np.ndarray:
    """Round scaled values (float64) with an oracle.

    ml_dtypes rounds to nearest even only; it gives NaN beyond E4M3's range and Inf beyond E5M2's,
    where MX saturates, hence the clip. gfloat does both roundings and saturates by itself.
    """
    if rounding == "even":
        largest = FORMATS[name].element.max
        return np.clip(v, -largest, largest).astype(ML_DTYPES[name]).astype(np.float64)
    return gfloat.round_ndarray(GFLOAT_INFOS[name], v, gfloat.RoundMode.TiesToAway, sat=True)


def oracle(x: torch.Tensor, name: str, rule: str, rounding: str) -> np.ndarray:
    """Blocks along the last axis, x finite: numpy's float64 holds every step exactly."""
    x64 = as_numpy(x).astype(np.float64)
    amax = np.abs(x64).max(axis=-1, keepdims=True)
    scale = np.exp2(scale_exponents(amax, name, rule))
    with np.errstate(over="ignore"):
        y = (with_oracle_element(name, x64 / scale, rounding) * scale).astype(np.float32)
    return as_numpy(torch.from_numpy(y).to(x.dtype))


def scale_exponents(amax: np.ndarray, name: str, rule: str) -> np.ndarray:
    emax, largest = FORMATS[name].element.emax, FORMATS[name].element.max
    mantissa_bits = FORMATS[name].element.mantissa_bits
    if rule == "rceil":
        _, exponent = np.frexp(amax / largest)  # at most one too high; products below are exact
        s = exponent - (amax <= largest * np.exp2(exponent - 1.0))
    elif rule == "ceil":
        mantissa, exponent = np.frexp(amax)
        s = exponent - (mantissa == 0.5) - emax
    else:
        mantissa, exponent = np.frexp(amax)
        if rule == "even":
            steps = 2.0 ** (mantissa_bits + 1)
            exponent = exponent + (np.floor(mantissa * steps + 0.5) >= steps)
        s = exponent - 1 - emax
    return np.where(amax == 0, -127, np.clip(s, -127, 127)).astype(np.float64)


@all_formats
@all_rules
@both_roundings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_agrees_with_the_oracle(name, rule, rounding, dtype):
    """Alone in its block, among its neighbours in magnitude, and among strangers.

    Left out: NaN and Inf, where implementations differ and ours has tests of its own.
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


def test_gfloat_and_ml_dtypes_agree_where_both_can_round():
    v = every_finite_value(torch.float16).double().numpy()
    for name, info in GFLOAT_INFOS.items():
        by_gfloat = gfloat.round_ndarray(info, v, gfloat.RoundMode.TiesToEven, sat=True)
        np.testing.assert_array_equal(by_gfloat, with_oracle_element(name, v, "even"))


def ulps_around(value: float) -> list[float]:
    """The float32 value and the two next to it, as far as they are finite."""
    centre = np.float32(value)
    around = [np.nextafter(centre, np.float32(0)), centre, np.nextafter(centre, np.float32(np.inf))]
    return [float(v) for v in around if np.isfinite(v)]


def hard_amaxes(name: str) -> list[float]:
    """One ulp around every place where a scale rule changes its mind, over the whole of float32."""
    _, mantissa_bits, _, largest = gold.MX_ELEMENTS[name]
    turning_points = (
        1.0,
        float(largest) / 2.0 ** gold.floor_log2(largest),
        2 - 2.0 ** -(mantissa_bits + 1),
    )
    exponents = (
        -149,
        -148,
        -140,
        -127,
        -126,
        -125,
        -120,
        -113,
        -111,
        -9,
        0,
        7,
        100,
        119,
        125,
        126,
        127,
    )
    return [
        amax
        for exponent, point in itertools.product(exponents, turning_points)
        for amax in ulps_around(np.float32(np.ldexp(point, exponent)))
        if amax > 0
    ]


def hard_blocks(name: str, rule: str) -> np.ndarray:
    """For each amax a block that holds ties, and one ulp to either side, spread over the grid."""
    grid = gold.mx_magnitudes(name)
    middles = [float((low + high) / 2) for low, high in itertools.pairwise(grid)]
    blocks = []
    for number, amax in enumerate(hard_amaxes(name)):
        scale = 2.0 ** gold.mx_scale(gold.Fraction(amax), name, rule)
        chosen = [middles[(5 * number + 13 * j) % len(middles)] * scale for j in range(9)]
        with np.errstate(over="ignore"):
            probes = [p for middle in [middles[0] * scale, *chosen] for p in ulps_around(middle)]
        fitting = [p if p <= amax else 0.0 for p in probes][:29]
        block = np.array([amax, 2.0**-149, -0.0, *fitting], dtype=np.float32)
        block = np.pad(block, (0, 32 - len(block)))
        block[1::2] *= -1
        blocks.append(block)
    return np.stack(blocks)


@all_formats
@all_rules
@both_roundings
def test_hard_blocks_agree_with_rational_arithmetic(name, rule, rounding):
    blocks = hard_blocks(name, rule)
    expected = np.stack([gold.mx_block(block.tolist(), name, rule, rounding) for block in blocks])
    y = quantise(torch.from_numpy(blocks), name, scale_rule=rule, rounding=rounding)
    assert_same(y, expected)


@all_formats
@all_rules
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_nan_or_inf_is_nan_as_a_whole_and_its_neighbours_are_not(name, rule, bad):
    x = torch.linspace(-3, 3, 96)
    clean = quantise(x, name, scale_rule=rule)
    x[40] = bad
    y = quantise(x, name, scale_rule=rule)
    assert y[32:64].isnan().all()
    assert_same(torch.cat([y[:32], y[64:]]), torch.cat([clean[:32], clean[64:]]))


@all_formats
@all_rules
@both_roundings
def test_a_zero_block_keeps_its_zeros_and_their_signs(name, rule, rounding):
    x = torch.zeros(64)
    x[::3] = -0.0
    assert_same(quantise(x, name, scale_rule=rule, rounding=rounding), x)


@all_formats
def test_small_negative_values_become_negative_zero(name):
    y = quantise(torch.tensor([1.0, -1e-20, 1e-20]), name)
    assert_same(y, torch.tensor([1.0, -0.0, 0.0]))


@pytest.mark.parametrize("rule", ["rceil", "ceil", "even"])
def test_the_last_binade_may_come_out_infinite(rule):
    largest = torch.finfo(torch.float32).max
    assert quantise(torch.tensor([largest]), "mxfp8", scale_rule=rule).item() == float("inf")
    floor = quantise(torch.tensor([largest]), "mxfp8", scale_rule="floor").item()
    assert floor == 448.0 * 2.0**119


def test_a_value_beyond_fp16_becomes_inf_in_fp16():
    x = torch.tensor([65504.0], dtype=torch.float16)
    assert quantise(x, "mxfp8", scale_rule="rceil").item() == float("inf")
    assert quantise(x.float(), "mxfp8", scale_rule="rceil").item() == 65536.0


def test_a_block_may_have_any_power_of_two_of_elements():
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    for block in (1, 2, 16, 64, 256, 1024):
        expected = np.stack(
            [
                np.concatenate(
                    [
                        gold.mx_block(part.tolist(), "mxfp4_e2m1", "floor")
                        for part in row.split(block)
                    ]
                )
                for row in x
            ]
        )
        assert_same(quantise(x, "mxfp4", block=block), expected)

"""Stochastic rounding: every decision against rational arithmetic, its mean, and its repeatability."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.extras.verify.declared_values import on_grid
from quantexp.extras.verify.draws import random_integers
from quantexp.extras.verify.gold import of_table
from quantexp.formats import (
    FORMATS,
    Place,
    decode,
    encode,
    layout,
    lies_on_grid,
    quantise,
    resolve,
    saturated,
)

from .tensors import assert_same, every_finite_value
from .test_quantising import views

STOCHASTIC = [name for name, fmt in FORMATS.items() if "seed" in fmt.options]
all_formats = pytest.mark.parametrize("name", STOCHASTIC)
SEED, OFFSET = 12345678901234567890, 42
DRAW: dict[str, Any] = {"rounding": "stochastic", "seed": SEED, "offset": OFFSET}


def grid_of(name: str) -> Sequence[Fraction]:
    if name == "hifp8":
        return gold.hif8_magnitudes()
    element = {"nvfp4_e2m1": "mxfp4_e2m1", "fp8_e4m3": "mxfp8_e4m3", "fp8_e5m2": "mxfp8_e5m2"}
    return gold.mx_magnitudes(element.get(name, name))


def rounded(x: torch.Tensor, name: str) -> np.ndarray:
    """Each magnitude rounded with the random number of its position; x needs no scale."""
    element = of_table(name).element
    numbers = random_integers(x.numel(), SEED, OFFSET)
    values = [
        on_grid(element, float(v), "stochastic", int(number))
        for v, number in zip(x.flatten(), numbers, strict=True)
    ]
    return np.array(values, dtype=np.float32)


def without_scale(x: torch.Tensor, name: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """x with blocks whose scale is 1, and the options that add no other scale."""
    fmt = FORMATS[name]
    if fmt.block is None:
        return x, {"scaling": "none"}
    largest = torch.full_like(x[:, :1], fmt.element.max)
    return torch.cat([x, largest], dim=1), {} if fmt.scale_rule else {"scaling": "none"}


def hard_values(name: str) -> torch.Tensor:
    """The grid, points between neighbours at many fractions, one ulp beside both, and tiny values."""
    grid = [float(v) for v in grid_of(name)]
    shares = [2.0**-24, 2.0**-25, 2.0**-23, 1 / 3, 0.5, 0.75, 1 - 2.0**-20]
    points = [
        low + share * (high - low) for low, high in itertools.pairwise(grid) for share in shares
    ]
    centres = np.array([*grid, *points], dtype=np.float32)
    beside = [np.nextafter(centres, np.float32(to)) for to in (0, np.inf)]
    values = np.concatenate([centres, *beside, np.array([2.0**-149, 2.0**-126], np.float32)])
    values = np.minimum(values, np.float32(grid[-1]))
    values[1::2] *= -1
    block = FORMATS[name].block or 32
    return torch.from_numpy(np.resize(values, (-(-len(values) // (block - 1)), block - 1)))


@all_formats
def test_every_decision_is_that_of_rational_arithmetic(name: str) -> None:
    x, options = without_scale(hard_values(name), name)
    assert_same(quantise(x, name, **DRAW, **options), rounded(x, name).reshape(x.shape))


@all_formats
def test_values_of_the_grid_stay(name: str) -> None:
    fmt = FORMATS[name]
    grid = torch.tensor([float(v) for v in grid_of(name)])
    x, options = without_scale(torch.stack([grid, -grid], dim=1), name)
    for seed in range(5):
        y = quantise(x, name, rounding="stochastic", seed=seed, **options)
        assert_same(y, x + 0.0 if fmt.name == "hifp8" else x)


@all_formats
def test_the_mean_of_many_draws_is_the_value(name: str) -> None:
    """The mean of 4096 draws of a variable on two points lies within five standard deviations."""
    fractions = torch.tensor([0.0, 0.01, 0.25, 0.5, 0.7, 0.99])
    grid = [float(v) for v in grid_of(name)]
    low, high = grid[len(grid) // 2], grid[len(grid) // 2 + 1]
    values = (low + fractions * (high - low)).repeat(4096, 1)
    x, options = without_scale(values, name)
    y = quantise(x, name, **DRAW, **options)[:, :6]
    assert set(y.unique().tolist()) == {low, high}
    mean, share = y.double().mean(dim=0), (values[0].double() - low) / (high - low)
    deviation = (high - low) * (share * (1 - share)).sqrt() / 64
    assert ((mean - values[0].double()).abs() <= 5 * deviation + 1e-12).all()


@all_formats
def test_draws_repeat_and_others_differ(name: str) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    once = quantise(x, name, **DRAW)
    assert_same(quantise(x, name, **DRAW), once)
    assert not torch.equal(quantise(x, name, **{**DRAW, "seed": 1}), once)
    assert not torch.equal(quantise(x, name, **{**DRAW, "offset": 1}), once)
    first: dict[str, Any] = {**DRAW, "offset": 0}
    assert_same(quantise(x, name, rounding="stochastic", seed=SEED), quantise(x, name, **first))


@all_formats
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_draw_belongs_to_a_place_whatever_the_strides(name: str, axis: int) -> None:
    for v in views(torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(2))).values():
        expected = quantise(v.contiguous(), name, axis=axis, **DRAW)
        y = quantise(v, name, axis=axis, **DRAW)
        assert y.shape == v.shape
        assert_same(y, expected)
        out = torch.empty_like(v.contiguous())
        assert_same(quantise(v, name, axis=axis, out=out, **DRAW), expected)


@all_formats
@pytest.mark.parametrize("limit", [64, 1000])
def test_the_size_of_chunks_changes_no_draw(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(7, 70, 11, generator=torch.Generator().manual_seed(3))
    expected = [quantise(x, name, axis=axis, **DRAW) for axis in range(3)]
    monkeypatch.setattr(layout, "chunk_limit", lambda device: limit)
    for module in ("families", "encoding"):
        monkeypatch.setattr(f"quantexp.formats.{module}.chunk_limit", lambda device: limit)
    for axis in range(3):
        assert_same(quantise(x, name, axis=axis, **DRAW), expected[axis])


@all_formats
@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_no_draw(name: str, threads: int) -> None:
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(4))
    before = torch.get_num_threads()
    expected = quantise(x, name, **DRAW)
    try:
        torch.set_num_threads(threads)
        assert_same(quantise(x, name, **DRAW), expected)
    finally:
        torch.set_num_threads(before)


@all_formats
@pytest.mark.parametrize("axis", [0, 1])
def test_decoding_codes_is_quantising(name: str, axis: int) -> None:
    x = torch.randn(70, 45, generator=torch.Generator().manual_seed(5))
    x[3, 4], x[50, 6] = math.nan, math.inf
    codes, scales = encode(x, name, axis=axis, **DRAW)
    assert_same(decode(codes, scales, name, axis=axis), quantise(x, name, axis=axis, **DRAW))


@all_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stochastically_rounded_tensors_lie_on_the_grid(name: str, dtype: torch.dtype) -> None:
    for seed in range(10):
        x = torch.randn(96, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)
        y = quantise(x, name, rounding="stochastic", seed=seed)
        assert lies_on_grid(y, name).all()


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
@pytest.mark.parametrize("rule", gold.SCALE_RULES)
def test_rounded_tensors_lie_on_the_grid_under_every_scale_rule(name: str, rule: str) -> None:
    x = every_finite_value(torch.bfloat16)
    x = x[x.abs().float().argsort(stable=True)].view(-1, 32)
    y = quantise(x, name, scale_rule=rule, **DRAW)
    finite = y.isfinite().all(dim=1)
    assert lies_on_grid(y[finite], resolve(name, scale_rule=rule)).all()


@all_formats
def test_nan_and_inf_are_treated_as_by_every_rounding(name: str) -> None:
    x = torch.tensor([[1.0, math.nan, -0.0], [2.0, math.inf, 0.0], [1.5, -1.5, -0.0]])
    y, even = quantise(x, name, **DRAW), quantise(x, name, rounding="even")
    assert torch.equal(y.isnan(), even.isnan())
    assert torch.equal(y == 0, even == 0)
    assert torch.equal(torch.signbit(y[~y.isnan()]), torch.signbit(even[~even.isnan()]))


# Pre-scaled by 3/4 and other factors.

FP4 = [name for name, fmt in FORMATS.items() if "pre_scale" in fmt.options]


def test_the_formats_of_four_bits_can_be_pre_scaled() -> None:
    assert FP4 == ["mxfp4_e2m1", "nvfp4_e2m1"]


@pytest.mark.parametrize("ties", ["even", "away"])
def test_three_quarters_of_a_block_are_rounded_under_the_scale_of_the_whole(ties: str) -> None:
    """Exactly: bf16 times 3/4 has ten significant bits."""
    values = every_finite_value(torch.bfloat16)
    values = values[values.abs() > 2.0**-100]
    x = values[values.abs().float().argsort(stable=True)][:58336].view(-1, 32)[::7]
    y = quantise(x, "mxfp4", pre_scale=True, rounding=ties)
    element = of_table("mxfp4_e2m1").element
    for row, got in zip(x.float().tolist(), y.float().tolist(), strict=True):
        magnitudes = [abs(Fraction(v)) for v in row]
        scale = Fraction(2) ** gold.mx_scale(max(magnitudes), "mxfp4_e2m1", "floor")
        on = [Fraction(on_grid(element, m * 3 / 4 / scale, ties)) for m in magnitudes]
        expected = [value * scale for value in on]
        assert [abs(Fraction(v)) for v in got] == expected


def test_with_the_rule_floor_nothing_saturates_and_the_mean_is_preserved() -> None:
    """Amax 7.9 is 5.925 scaled, between 4 and 6; without the 3/4 it would become 6."""
    x = torch.full((4096, 32), 7.9)
    assert quantise(x[:1], "mxfp4", **DRAW).unique().tolist() == [6.0]
    y = quantise(x, "mxfp4", pre_scale=True, **DRAW)
    assert set(y.unique().tolist()) == {4.0, 6.0}
    deviation = 2 * (0.0375 * 0.9625) ** 0.5 / x.numel() ** 0.5
    assert abs(float(y.double().mean()) - 0.75 * 7.9) < 5 * deviation


@pytest.mark.parametrize("part", [16 / 17, 0.8])
def test_any_part_of_a_block_is_rounded_under_the_scale_of_the_whole(part: float) -> None:
    """The factor and its product with an element are each rounded to float32, and the element to the grid."""
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
    y = quantise(x, "mxfp4", pre_scale=part)
    element = of_table("mxfp4_e2m1").element
    for row, got in zip(x.tolist(), y.tolist(), strict=True):
        s = gold.mx_scale(max(abs(Fraction(v)) for v in row), "mxfp4_e2m1", "floor")
        for v, q in zip(row, got, strict=True):
            scaled = np.float32(abs(v) * 2.0**-s) * np.float32(part)
            assert abs(q) * 2.0**-s == min(on_grid(element, Fraction(float(scaled)), "even"), 6)


def test_nvfp4_does_not_saturate_after_16_17ths() -> None:
    """E4M3 rounds a scale of 17/16 down to 1: amax is then 6.375 in its units, and 6 after the factor."""
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([6 * 17 / 16, 0.5])
    assert saturated(x, resolve("nvfp4", scaling="none")).sum() == 1
    spec = resolve("nvfp4", scaling="none", pre_scale=16 / 17)
    assert not saturated(x, spec).any()
    assert quantise(x, spec)[0, 0] == 6


@pytest.mark.parametrize("part", [0.5, 1.0, 1, 2.0, math.nan])
def test_a_part_that_is_none_is_refused(part: float) -> None:
    words = rf"pre_scale must be true, false or a number of at least 0.75 and below 1, got {part}"
    with pytest.raises(ValueError, match=words):
        quantise(torch.ones(32), "mxfp4", pre_scale=part)


@pytest.mark.parametrize("scaling", ["none", "current", "exact"])
def test_nvfp4_is_scaled_by_three_quarters_of_its_blocks(scaling: str) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(6))
    _, plain = encode(x, "nvfp4", scaling=scaling)
    codes, scales = encode(x, "nvfp4", scaling=scaling, pre_scale=True)
    assert torch.equal(plain.block, scales.block)
    y = quantise(x, "nvfp4", scaling=scaling, pre_scale=True)
    assert_same(decode(codes, scales, "nvfp4"), y)
    assert (codes & 7).max() == 6  # 4: three quarters of at most 6.4
    assert float((y / 0.75 - x).square().mean()) < 0.03


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", [{}, DRAW])
@pytest.mark.parametrize("part", [True, 16 / 17])
def test_pre_scaled_tensors_lie_on_the_grid(
    name: str, dtype: torch.dtype, rounding: dict[str, Any], part: bool | float
) -> None:
    x = torch.randn(96, 128, generator=torch.Generator().manual_seed(7)).to(dtype)
    y = quantise(x, name, pre_scale=part, **rounding)
    amax: dict[str, Any] = {"amax": x.abs().max().float()} if name == "nvfp4_e2m1" else {}
    assert lies_on_grid(y, name, **amax).all()


@all_formats
def test_a_part_of_whole_blocks_is_rounded_as_it_is_in_the_whole(name: str) -> None:
    x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    options: dict[str, Any] = DRAW | ({} if FORMATS[name].scale_rule else {"scaling": "none"})
    part = x[1:, 32:, :64]
    for axis in (-1, 1):
        whole = quantise(x, name, axis=axis, **options)[1:, 32:, :64]
        place = Place((3, 64, 96), (1, 32, 0))
        assert_same(quantise(part, name, axis=axis, place=place, **options), whole)
        assert not torch.equal(quantise(part, name, axis=axis, **options), whole)

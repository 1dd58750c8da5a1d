"""The arithmetic of any grid equals that of the shipped families, and handles what they handle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import FORMATS, quantise, quantise_both, saturated, scales_of
from quantexp.formats.declared.lists import places_from_zero
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.types import BlockRule, BlockScale, BlockScaleKind, Family, Format, ScaleRule

ROUNDINGS: list[dict[str, Any]] = [
    {"rounding": "even"},
    {"rounding": "away"},
    {"rounding": "zero"},
    {"rounding": "stochastic", "seed": 3},
]
E2M1 = [0.0, *(sign * value for value in (0.5, 1, 1.5, 2, 3, 4, 6) for sign in (1, -1))]


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 96, generator=generator)
    x *= torch.exp(4 * torch.randn(48, 1, generator=generator))
    x[0], x[3] = 0.0, -0.0
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    return x


def same(a: Tensor, b: Tensor) -> bool:
    equal = (a == b) & (a.signbit() == b.signbit())
    return bool((equal | (a.isnan() & b.isnan())).all())


def as_grid(fmt: Format, scale: BlockScale) -> Format:
    """A format of the table as one of the family `grid`."""
    options = frozenset({"rounding", "seed", "offset", "scaling", "amax"})
    return replace(
        fmt,
        family=Family.GRID,
        scale_rule=None,
        block_scale=None,
        options=options,
        grid_scale=scale,
    )


@pytest.mark.parametrize("options", ROUNDINGS, ids=lambda options: options["rounding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_shipped_families(x: Tensor, dtype: torch.dtype, options: Any) -> None:
    x = x.to(dtype)
    for fmt in FORMATS.values():
        for axis in (0, 1):
            if fmt.family is Family.MX:
                for rule in ScaleRule:
                    scale = BlockScale(BlockScaleKind.E8M0, BlockRule(rule.value))
                    expected = quantise(x, fmt, scale_rule=rule, axis=axis, **options)
                    assert same(expected, quantise(x, as_grid(fmt, scale), axis=axis, **options))
            elif fmt.family is Family.NV:
                scale = BlockScale(BlockScaleKind.FLOAT, BlockRule.EXACT, fmt.block_scale)
                for scaling in ("none", "current", "exact"):
                    expected = quantise(x, fmt, scaling=scaling, axis=axis, **options)
                    got = quantise(x, as_grid(fmt, scale), scaling=scaling, axis=axis, **options)
                    assert same(expected, got)


@pytest.mark.parametrize("options", ROUNDINGS, ids=lambda options: options["rounding"])
def test_a_list_of_the_values_of_e2m1_is_mxfp4_but_for_the_sign_of_zero(
    x: Tensor, options: Any
) -> None:
    listed = declared_format("listed", {"element": {"values": E2M1}, "block": 32})
    a, b = quantise(x, "mxfp4", **options), quantise(x, listed, **options)
    assert bool(((a == b) | (a.isnan() & b.isnan())).all())
    assert not bool(b[b == 0].signbit().any())


def test_places_of_a_list_count_from_zero_outwards() -> None:
    assert places_from_zero((-2.0, -1.0, 0.0, 1.0)) == [2, 1, 0, 1]
    assert places_from_zero((-1.0, 1.0, 2.0)) == [1, 1, 2]


def test_ties_of_a_list() -> None:
    v = torch.tensor([-1.0, 0.0, 0.0, 1.0, 1.5])  # the largest is 1.5
    listed = declared_format(
        "ties", {"element": {"values": [-1.5, -0.5, 0.5, 1.5]}, "scale": "none"}
    )
    assert quantise(v, listed).tolist() == [-1.5, 0.5, 0.5, 1.5, 1.5]
    assert quantise(v, listed, rounding="away").tolist() == [-1.5, 0.5, 0.5, 1.5, 1.5]


def test_values_beyond_an_integer_of_both_signs_saturate_on_their_side() -> None:
    fmt = declared_format(
        "int4a", {"element": {"integer_bits": 4, "symmetric": False}, "scale": "none"}
    )
    x = torch.tensor([-9.0, -8.0, 7.0, 7.4, 99.0])
    assert quantise(x, fmt).tolist() == [-8, -8, 7, 7, 7]
    assert saturated(x, fmt).tolist() == [True, False, False, True, True]


def test_blocks_of_several_rows_share_a_scale(x: Tensor) -> None:
    x = x.nan_to_num(posinf=1.0)
    tile = declared_format("tile", {"element": "e4m3", "block": [16, 32], "scale": "fp32"})
    flat = declared_format("flat", {"element": "e4m3", "block": 16 * 32, "scale": "fp32"})
    y = quantise(x, tile)
    for r in range(0, 48, 16):
        for n in range(0, 96, 32):
            part = x[r : r + 16, n : n + 32]
            expected = quantise(part.reshape(1, -1), flat).view(16, 32)
            assert same(y[r : r + 16, n : n + 32], expected)
    assert scales_of(x, tile).shape == (3, 3)
    assert torch.equal(quantise(x.t().contiguous(), tile, axis=0), y.t())


def test_short_blocks_of_several_rows_are_blocks(x: Tensor) -> None:
    x = x.nan_to_num(posinf=1.0)
    tile = declared_format("tile", {"element": "e4m3", "block": [20, 40], "scale": "fp32"})
    y = quantise(x, tile)
    assert torch.equal(y[40:, 80:], quantise(x[40:, 80:].contiguous(), tile))


def test_square_blocks_give_one_copy_for_both_axes(x: Tensor) -> None:
    square = declared_format("square", {"element": "e2m1", "block": [16, 16], "scale": "e4m3"})
    first, second = quantise_both(x, square, axes=(1, 0))
    assert first is second
    assert same(first, quantise(x, square, axis=0))


def test_a_whole_row_has_one_scale(x: Tensor) -> None:
    row = declared_format("row", {"element": "e4m3", "block": "row", "scale": "fp32"})
    assert scales_of(x, row).shape == (48, 1)
    assert scales_of(x, row, axis=0).shape == (1, 96)
    some = quantise(x, row)
    assert torch.equal(some[5:6], quantise(x[5:6], row))


def test_search_errs_no_more_than_the_scale_of_the_amax(x: Tensor) -> None:
    x = x[5:]
    keys = {"element": "e2m1", "block": 32}
    for scale, rule in (
        ("e8m0", "rceil"),
        ("ue5m3", "exact"),
        ("fp32", "exact"),
        ("bf16", "exact"),
    ):
        errors = [
            float(
                (
                    quantise(x, declared_format("s", keys | {"scale": scale, "scale_rule": r})) - x
                ).norm()
            )
            for r in ("search", rule)
        ]
        assert errors[0] < errors[1]


def test_a_block_takes_the_candidate_with_the_least_error(x: Tensor) -> None:
    """E2M1 has no value between 4 and 6: amax 6 and 5 fit best at 4, amax 6 and 1 at 6."""
    keys = {"element": "e2m1", "block": 4, "scale": "e4m3", "candidates": [6, 4]}
    fmt = declared_format("own", keys)
    blocks = torch.tensor([[6.0, 5, 0, 0], [6, 1, 0, 0], [4, 4, 4, 4], [0, 0, 0, 0]])
    # e4m3(4 / 6) = 0.6875 makes 4.125 of 4.
    assert scales_of(blocks, fmt).flatten().tolist() == [1.5, 1.0, 1.0, 2.0**-9]
    assert quantise(blocks, fmt)[0].tolist() == [6.0, 4.5, 0.0, 0.0]
    x = x[5:]
    fixed = {"element": "e2m1", "block": 32, "scale": "ue5m3"}
    for choose, error in (
        ("mse", lambda e: e.square().sum(-1)),
        ("mae", lambda e: e.abs().sum(-1)),
        ("max", lambda e: e.abs().amax(-1)),
    ):
        own = {"candidates": [6, 4, 5], "choose": choose}
        y = quantise(x, declared_format("own", fixed | own))
        of_own = error((y - x).double().view(len(x), -1, 32))
        of_six = error(
            (quantise(x, declared_format("six", fixed)) - x).double().view(len(x), -1, 32)
        )
        assert bool((of_own <= of_six * (1 + 2.0**-20)).all())
        assert bool((of_own < of_six).any())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 40)])
def test_every_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for keys in (
        {"element": "e3m3", "block": 24, "scale": "ue5m3"},
        {"element": "e4m3", "block": [2, 16], "scale": "fp32"},
        {"element": "e4m3", "block": "row", "scale": "fp32"},
        {"element": {"values": [-1, 0, 1]}},
        {"element": "e2m1", "block": 16, "scale": "e4m3", "candidates": [6, 4]},
    ):
        fmt = declared_format("any", keys)
        y = quantise(x, fmt)
        assert y.shape == x.shape
        assert saturated(x, fmt).shape == x.shape
        out = torch.empty_like(x)
        assert quantise(x, fmt, out=out) is out
        assert torch.equal(out, y)
        scales_of(x, fmt)


def test_grids_have_neither_codes_nor_a_search_for_their_scales(x: Tensor) -> None:
    from quantexp.formats import encode, lies_on_grid

    fmt = declared_format("own", {"element": "e3m3", "block": 24, "scale": "ue5m3"})
    with pytest.raises(ValueError, match="own has no codes here: take quantise"):
        encode(x, fmt)
    with pytest.raises(ValueError, match="the scales of own do not follow from quantised values"):
        lies_on_grid(x, fmt)
    with pytest.raises(ValueError, match="wide has no codes here"):
        encode(x, declared_format("wide", {"element": "e4m5", "block": 32}))

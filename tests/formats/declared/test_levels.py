"""Blocks that take one of several elements, micro-exponents, and scales that share a correction."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.formats import hadamard, quantise, saturated, scales_of
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.types import Format
from quantexp.quant.slots import declared_formats

S1P2 = {"integer_bits": 4, "step": 0.25}


def declared(**keys: Any) -> Format:
    return declared_format("own", keys)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_block_takes_the_better_of_two_grids(axis: int) -> None:
    x = normal(64, 96)
    keys: dict[str, Any] = {"block": 16, "scale": "e4m3"}
    both = quantise(x, declared(element=["e2m1", "int4"], **keys), axis=axis)
    alone = [quantise(x, declared(element=e, **keys), axis=axis) for e in ("e2m1", "int4")]
    errors = [
        ((y - x).double().movedim(axis, -1).unflatten(-1, (-1, 16)) ** 2).sum(-1)
        for y in (both, *alone)
    ]
    # Sums of squares in another order may differ in their last bits.
    assert bool((errors[0] <= torch.minimum(errors[1], errors[2]) * (1 + 2.0**-40)).all())
    assert bool((errors[0] < errors[1]).any())
    assert bool((errors[0] < errors[2]).any())


def test_a_grid_suits_the_values_of_its_block() -> None:
    """Evenly spaced values have no error as integers; 0.5 beside 6 has none as E2M1. Equal errors: the first grid."""
    fmt = declared(element=["e2m1", "int4"], block=4, scale="fp32")
    x = torch.tensor([[7.0, 5, 3, 1], [6, 0.5, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(quantise(x, fmt), x)
    assert scales_of(x, fmt).flatten().tolist() == [1.0, 1.0, 1.0]
    assert not bool(saturated(x, fmt).any())


def test_sfp4_takes_the_best_of_nvfp4s_grid_and_two_shifted_ones() -> None:
    """In float64, by the definition of arXiv 2605.12327: each grid plus 0, 0.5 or -0.5, under scales from the amax."""
    fmt = declared_formats(compose(["quant=more/linear_sfp4_fprop"]).quant)["sfp4"]
    x = normal(256, 64) * 30
    x[3] = 0.0
    tensor_scale = float(x.abs().max()) / (6 * 448)
    blocks = x.double().numpy().reshape(-1, 16) / tensor_scale
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    plain = np.concatenate([-e2m1[:0:-1], e2m1])
    tried = []
    for grid, top in itertools.product((plain, plain + 0.5, plain - 0.5), (6, 6.5, 5.5)):
        amax = torch.from_numpy(np.abs(blocks).max(1, keepdims=True) / top)
        scale = (
            amax.float().clamp(max=448).to(torch.float8_e4m3fn).double().clamp(min=2.0**-9).numpy()
        )
        nearest = np.abs(blocks[..., None] / scale[..., None] - grid).argmin(-1)
        tried.append(grid[nearest] * scale)
    errors = np.stack([((each - blocks) ** 2).sum(1) for each in tried])
    best = np.stack(tried)[errors.argmin(0), np.arange(len(blocks))] * tensor_scale
    y = quantise(x, fmt, axis=-1).double().numpy().reshape(-1, 16)
    np.testing.assert_allclose(y, best, rtol=2.0**-22, atol=0)
    assert len(set(errors.argmin(0) // 3)) == 3
    error = ((y - x.double().numpy().reshape(-1, 16)) ** 2).sum() / float(x.double().square().sum())
    assert 0.0058 < error < 0.0062  # nvfp4: 0.0091


def micro_by_definition(x: list[float], levels: list[int]) -> list[float]:
    """A block of S1P2 under a float32 scale, in fractions."""
    amax = max(map(abs, x))
    d = Fraction(float(torch.tensor(amax * 2.0 ** -len(levels)) / torch.tensor(1.75)))
    factors = [d] * len(x)
    for number, size in enumerate(levels):
        for start in range(0, len(x), size):
            group = range(start, min(start + size, len(x)))
            if max(abs(Fraction(x[n])) / factors[n] for n in group) >= 2 ** (len(levels) - number):
                for n in group:
                    factors[n] *= 2
    return [
        float(max(-7, min(7, round(Fraction(value) / factor * 4))) * factor / 4)
        for value, factor in zip(x, factors, strict=True)
    ]


def test_groups_of_a_block_double_its_scale() -> None:
    fmt = declared(element=S1P2, block=16, scale="fp32", micro_exponents=[8, 4])
    rows = [*normal(40, 16).tolist(), [7.0] + [0.1] * 15, [0.0] * 8 + [-3.0] * 8]
    x = torch.tensor(rows)
    expected = torch.tensor([micro_by_definition(row, [8, 4]) for row in x.tolist()])
    # d is rounded once, and so is its product with an element: two roundings of float32.
    assert torch.allclose(quantise(x, fmt), expected, rtol=2.0**-22, atol=0)
    # The steps are 1 in the four elements of the largest, half in the next four, and a quarter elsewhere.
    y = quantise(torch.tensor([[7.0, 1.6, 0, 0, 0.6, 0, 0, 0, 0.3, *[0.0] * 7]]), fmt)[0]
    assert [float(y[n]) for n in (1, 4, 8)] == [2, 0.5, 0.25]


def test_hifloat4_has_half_the_error_of_mxfp4() -> None:
    """The paper's abstract (arXiv 2604.08826) has 0.85% and 1.44%; of normal numbers it is the same ratio."""
    x = normal(256, 1024)
    errors = [float((quantise(x, f) - x).square().mean()) for f in ("hifloat4", "mxfp4")]
    assert 0.4 < errors[0] / errors[1] < 0.6


def test_scales_of_corrected_blocks_keep_the_projection_on_the_source() -> None:
    """With float32 scales, nothing but the correction is rounded: x y = x x for each 32 elements of one scale."""
    fmt = declared(element="e2m1", block=32, scale="fp32", eden=32)
    x = normal(64, 128).view(-1, 32)
    y = quantise(x, fmt)
    ratios = (x * y).double().sum(-1) / x.double().square().sum(-1)
    # The correction and each of 32 products are rounded to float32.
    assert torch.allclose(ratios, torch.ones_like(ratios), rtol=2.0**-20, atol=0)


def test_ms_eden_after_random_transforms_has_no_bias_and_less_error_than_stochastic_rounding() -> (
    None
):
    """arXiv 2601.22813: less than half of the squared error of stochastic rounding. 4096 draws of one tensor.

    The mean of n results without bias has 1 / n of the error of one, within a factor of 2 for 1024 elements.
    """
    x = normal(32, 32)
    number, one = 4096, torch.zeros(())
    total = torch.zeros_like(x)
    signs = torch.randint(0, 2, (number, 32), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    for seed in range(number):
        v = hadamard(x, axis=-1, block=32, signs=signs[seed])
        y = quantise(v, "nvfp4_ms_eden", rounding="stochastic", seed=seed)
        back = hadamard(y, axis=-1, block=32, left=False) * signs[seed]
        # 32 is no square: the transform of the left is scaled by 1/8, that of the right by 1/4.
        total += back
        one = one + (back - x).square().mean()
    error = float(one) / number
    assert float((total / number - x).square().mean()) < 2 * error / number
    drawn = [
        quantise(x, "nvfp4", rounding="stochastic", pre_scale=16 / 17, seed=seed) * 17 / 16 - x
        for seed in range(64)
    ]
    assert error < 0.5 * float(torch.stack(drawn).square().mean())


def test_a_corrected_scale_has_the_random_number_of_its_blocks_first_element() -> None:
    fmt = declared(element="e2m1", block=8, scale="e4m3", eden=16, rounding="stochastic")
    x = normal(512, 32)
    whole = quantise(x, fmt, seed=7)
    from quantexp.formats.layout import Place

    part = quantise(x[256:].contiguous(), fmt, seed=7, place=Place((512, 32), (256, 0)))
    assert torch.equal(part, whole[256:])
    drawn = [quantise(x, fmt, seed=seed) for seed in range(2)]
    ratio = (drawn[0] / drawn[1]).unflatten(-1, (-1, 8))
    same = ratio.isnan() | (ratio == ratio.nan_to_num(0.0).amax(-1, keepdim=True))
    assert bool(same.all()), "all elements of a block move together"
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("kind", ["fp32", "power_of_two"])
@pytest.mark.parametrize("macro", [32, "row"])
def test_a_macro_block_has_the_scale_that_it_would_have_as_a_tensor(
    macro: int | str, kind: str
) -> None:
    keys = {"element": "e2m1", "block": 16, "scale": "e4m3", "tensor_scale": kind}
    x = normal(6, 72) * torch.tensor([1e-9, 1e-3, 1, 7, 1e5, 0.0])[:, None]
    fmt, alone = declared(macro_block=macro, **keys), declared(**keys)
    size = 72 if macro == "row" else 32
    y, scales = quantise(x, fmt), scales_of(x, fmt)
    assert isinstance(scales, Tensor)
    assert scales.shape == (6, 5)
    for row, start in itertools.product(range(6), range(0, 72, size)):
        at = slice(row, row + 1), slice(start, start + size)
        part = x[at].contiguous()
        assert torch.equal(y[at], quantise(part, alone))
        assert torch.equal(saturated(x, fmt)[at], saturated(part, alone))
        of_part = scales[row : row + 1, start // 16 : -(-(start + size) // 16)]
        of_tensor = scales_of(part, alone)
        assert isinstance(of_tensor, Tensor)
        assert torch.equal(of_part, of_tensor)


def test_macro_blocks_keep_blocks_of_powers_of_two_from_wasting_their_range() -> None:
    """arXiv 2605.20402: a macro block's scale takes a part of the bias of powers of two."""
    x = normal(256, 1024)
    macro = declared(element="e2m1", block=32, macro_block=128, tensor_scale="fp32")
    errors = [float((quantise(x, f) - x).square().mean()) for f in (macro, "mxfp4")]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"element": ["e2m1", "int4"], "block": 16, "scale": "e4m3"},
        {"element": S1P2, "block": 16, "scale": "ue6m2", "micro_exponents": [8, 4]},
        {"element": "e2m1", "block": 4, "scale": "e4m3", "eden": 16},
        {"element": "e2m1", "block": 4, "tensor_scale": "fp32", "macro_block": 16},
    ],
)
def test_nan_or_infinity_makes_the_whole_block_nan(keys: dict[str, Any]) -> None:
    x = normal(3, 40)
    x[0, 3], x[1, 20] = torch.nan, torch.inf
    y = quantise(x, declared(**keys))
    for row, start in itertools.product(range(3), (0, 16, 32)):
        is_spoilt = (row, start) in ((0, 0), (1, 16))
        assert bool(y[row, start : start + 16].isnan().all()) == is_spoilt
        assert bool(y[row, start : start + 16].isfinite().all()) != is_spoilt


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 40)])
def test_every_shape(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    for keys in (
        {"element": ["e2m1", "int4"], "block": [2, 16], "scale": "e4m3"},
        {"element": S1P2, "block": 16, "micro_exponents": [4]},
        {"element": "e2m1", "block": 4, "scale": "e4m3", "eden": 16},
        {"element": "e2m1", "block": 4, "tensor_scale": "fp32", "macro_block": "row"},
    ):
        fmt = declared(**keys)
        assert quantise(x, fmt).shape == saturated(x, fmt).shape == x.shape
        scales_of(x, fmt)

"""NVFP4 against casts of ml_dtypes over every value, and against rational arithmetic for hard cases."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.extras.verify.cases import hard_nv_blocks
from quantexp.extras.verify.declared_values import element_values, on_grid
from quantexp.extras.verify.exact import Case, answer
from quantexp.extras.verify.gold import of_table, quantised
from quantexp.extras.verify.oracles import ml_dtypes_oracle
from quantexp.extras.verify.rational import floor_log2
from quantexp.formats import encode, finite_amax, quantise

from .tensors import as_numpy, assert_same, every_finite_value, sqnr_db

scalings = pytest.mark.parametrize("scaling", ["none", "current", "exact"])


def tensor_scale(amax: float, scaling: str) -> np.float32:
    """1, the smallest power of two that scales amax to at most 2688, or amax / 2688 in float32."""
    if scaling == "none" or amax == 0:
        return np.float32(1)
    if scaling == "exact":
        return max(np.float32(np.float64(amax) / 2688), np.float32(2.0**-117))
    exponent = floor_log2(Fraction(amax) / 2688)
    exponent += Fraction(amax) > 2688 * Fraction(2) ** exponent
    return np.float32(2.0 ** max(exponent, -117))


def oracle(x: torch.Tensor, scaling: str) -> np.ndarray:
    """Blocks along the last axis, x finite: the roundings to a grid are ml_dtypes' casts."""
    dtype = str(x.dtype).removeprefix("torch.")
    case = Case("nvfp4_e2m1", as_numpy(x), dtype, options={"scaling": scaling})
    opinion = ml_dtypes_oracle.oracle().opinion(case, answer(case))
    assert opinion is not None
    assert opinion.answer.tensor_scale == tensor_scale(float(np.abs(case.x).max()), scaling)
    return opinion.answer.values


@scalings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_agrees_with_the_oracle(dtype: torch.dtype, scaling: str) -> None:
    """In tensors of neighbours in magnitude, each with its own tensor scale, and shuffled."""
    values = every_finite_value(dtype)
    values = values[: len(values) // 512 * 512]
    by_magnitude = values[values.abs().float().argsort(stable=True)]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    for x in (*by_magnitude.view(-1, 32, 16), shuffled.view(-1, 16), by_magnitude.view(-1, 16)):
        y = quantise(x, "nvfp4", scaling=scaling)
        assert y.dtype == dtype
        assert_same(y, oracle(x, scaling))


@scalings
def test_float32_values_agree_with_the_oracle(scaling: str) -> None:
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(2))
    x *= torch.randn(4096, 1, generator=torch.Generator().manual_seed(3)).mul(4).exp()
    assert_same(quantise(x, "nvfp4", scaling=scaling), oracle(x, scaling))


def exact_block(block: np.ndarray, t: Fraction, ties: str) -> np.ndarray:
    """One block with only three roundings: two to a grid, and the last to float32."""
    scales, grid = element_values("e4m3")[0], element_values("e2m1")[0]
    magnitudes = [Fraction(abs(float(v))) for v in block]
    b = max(Fraction(2.0**-9), Fraction(on_grid(scales, max(magnitudes) / 6 / t, "even")))
    y = [float(Fraction(on_grid(grid, m / (b * t), ties)) * b * t) for m in magnitudes]
    with np.errstate(over="ignore"):
        return np.copysign(np.array(y).astype(np.float32), block)


@pytest.mark.parametrize("ties", ["even", "away", "zero"])
@pytest.mark.parametrize("t", [1.0, 2.0**-100, 2.0**90])
def test_hard_blocks_under_a_power_of_two_agree_with_exact_rational_arithmetic(
    t: float, ties: str
) -> None:
    """The caller passes the amax that gives this t, as for a shard."""
    blocks = hard_nv_blocks(t)
    options: dict[str, Any] = {
        "rounding": ties,
        "scaling": "current",
        "amax": torch.tensor(2688 * t),
    }
    y = quantise(torch.from_numpy(blocks), "nvfp4", **options)
    assert_same(y, np.stack([exact_block(block, Fraction(t), ties) for block in blocks]))


@pytest.mark.parametrize("ties", ["even", "away", "zero"])
@pytest.mark.parametrize("amax", [1.0, 3.14159, 7e-30, 5e30])
def test_hard_blocks_under_any_scale_agree_with_one_rounding_an_operation(
    amax: float, ties: str
) -> None:
    t = float(tensor_scale(float(np.float32(amax)), "exact"))
    blocks = hard_nv_blocks(t)
    y = quantise(torch.from_numpy(blocks), "nvfp4", rounding=ties, amax=torch.tensor(amax))
    expected = quantised(of_table("nvfp4_e2m1"), blocks, ties, amax=float(np.float32(amax)))
    assert_same(y, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_nan_or_inf_is_nan_as_a_whole_and_its_neighbours_are_not(bad: float) -> None:
    x = torch.linspace(-3, 3, 48)
    clean = quantise(x, "nvfp4")
    x[20] = bad
    y = quantise(x, "nvfp4")
    assert y[16:32].isnan().all()
    assert_same(torch.cat([y[:16], y[32:]]), torch.cat([clean[:16], clean[32:]]))


def test_zeros_keep_their_signs() -> None:
    x = torch.tensor([0.0, -0.0] * 10)
    assert_same(quantise(x, "nvfp4"), x)


def test_a_scale_that_is_too_small_for_amax_saturates_at_six() -> None:
    x = torch.tensor([100.0, 1.0])
    y = quantise(x, "nvfp4", scaling="current", amax=torch.tensor(21.0))
    assert y.tolist() == [21.0, 1.75]


def test_a_tiny_tensor_keeps_normal_scales() -> None:
    """t is at least 2^-117, so that every product with a block scale is a normal number."""
    x = torch.full((16,), 2.0**-140)
    _, scales = encode(x, "nvfp4")
    assert scales.tensor == 2.0**-117
    assert_same(quantise(x, "nvfp4"), torch.zeros(16))


def test_shards_with_the_reduced_amax_are_quantised_as_the_whole() -> None:
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(9))
    x[1] *= 100
    amax = torch.maximum(finite_amax(x[0]), finite_amax(x[1]))
    for scaling in ("current", "exact"):
        shards = [quantise(part, "nvfp4", scaling=scaling, amax=amax) for part in x]
        assert_same(torch.stack(shards), quantise(x, "nvfp4", scaling=scaling))


def test_the_noise_is_that_of_the_casts_of_another_library() -> None:
    """0.1 dB, as for the other formats; blocks of 16 and a finer scale gain about 2 dB on mxfp4."""
    x = torch.randn(1 << 17, 16, generator=torch.Generator().manual_seed(12))
    expected = sqnr_db(x, torch.from_numpy(oracle(x, "exact")))
    assert sqnr_db(x, quantise(x, "nvfp4")) == pytest.approx(expected, abs=0.1)
    assert expected > sqnr_db(x, quantise(x, "mxfp4")) + 1.5


def test_quantising_again_may_change_a_block_under_a_subnormal_scale() -> None:
    """In units of 2^-9, E4M3's smallest value: 9 / 6 = 1.5 is a tie and becomes b = 2, so 9 / 2 becomes 4, which is 8.

    Then 8 / 6 becomes b = 1, under which 6 is the largest value. The example in docs/formats.md.
    """
    unit = 2.0**-9
    once = quantise(torch.tensor([9 * unit]), "nvfp4", scaling="none")
    again = quantise(once, "nvfp4", scaling="none")
    assert (once.item() / unit, again.item() / unit) == (8.0, 6.0)
    assert torch.equal(quantise(again, "nvfp4", scaling="none"), again)


def test_quantising_again_may_move_the_exact_scale_by_a_rounding() -> None:
    """amax becomes 6 b t, which is amax up to the rounding of t = amax / 2688, b t and the product."""
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(5))
    once = torch.stack([quantise(row, "nvfp4") for row in x])
    again = torch.stack([quantise(row, "nvfp4") for row in once])
    changed = (again != once).any(dim=-1)
    assert changed.any()
    assert not changed.all()
    assert torch.allclose(again, once, rtol=3 * 2.0**-23, atol=0.0), "a few units of the last bit"

"""DGE against the smooth step of arXiv 2501.17116 (equation 7), differentiated numerically."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.formats import quantise, resolve
from quantexp.formats.definitions.files import declared_by_name
from quantexp.formats.estimator import MOST, dge_factors, noise_slopes
from quantexp.formats.table import BY_ANY_NAME
from quantexp.proof.image import derivative, noise_slope

from .kernels.builds import wild
from .kernels.gpu_cases import hard_float32
from .tensors import assert_same

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def smooth_step(v: np.ndarray, power: float) -> np.ndarray:
    """Equation 7 of the paper in each interval of E2M1: the function whose derivative training takes."""
    above = np.clip(np.searchsorted(E2M1, v, side="right"), 1, len(E2M1) - 1)
    low, width = E2M1[above - 1], E2M1[above] - E2M1[above - 1]
    t = 2 * (v - low) / width - 1
    step: np.ndarray = low + width / 2 * (1 + np.sign(t) * np.abs(t) ** (1 / power))
    return step


@pytest.mark.parametrize("power", [1.5, 5.0, 20.0])
def test_the_factor_is_the_slope_of_the_smooth_step(power: float) -> None:
    """One block whose scale is 1: its amax is 6. Differences over 1e-7 give slopes to 1e-4 off the steepest part."""
    v = np.linspace(0.003, 5.99, 509)
    x = torch.tensor([*v, -6.0, 0.0, 0.0])
    factors = dge_factors(x, resolve("mxfp4", block=512), power, 0, None)[:509].numpy()
    step = 1e-7
    slope = (smooth_step(v + step, power) - smooth_step(v - step, power)) / (2 * step)
    # no difference spans a value of the grid, where the slope jumps, or a tie, where it is infinite
    apart = np.abs(v[:, None] - np.concatenate([E2M1, (E2M1[1:] + E2M1[:-1]) / 2])).min(axis=1)
    is_smooth = (apart > 1e-4) & (slope < 2.9)
    assert is_smooth.sum() > 400
    # the factors are float32 of x in float32, whose rounding the steepest part enlarges
    np.testing.assert_allclose(factors[is_smooth], slope[is_smooth], rtol=2e-3)
    assert (factors[slope > 3.1] == MOST).all()


def test_the_sign_and_the_scale_of_a_block_do_not_matter() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for fmt in ("mxfp4", "mxfp8", "nvfp4", "fp8_e4m3", "hifp8"):
        spec = resolve(fmt)
        factors = dge_factors(x, spec, 5.0, 1, None)
        assert_same(dge_factors(-x, spec, 5.0, 1, None), factors)
        assert_same(dge_factors(x.t(), spec, 5.0, 0, None).t().contiguous(), factors)
        assert 0.4 < factors.mean() < 0.7
    factors = dge_factors(x, resolve("mxfp4"), 5.0, 1, None)
    assert_same(dge_factors(x * 2**7, resolve("mxfp4"), 5.0, 1, None), factors)


@pytest.mark.parametrize(
    "name",
    ["mxfp4", "nvfp4", "fp8_e4m3", "hifp8", "nvfp4_16x16", "fp8_128x128", "int4_g128", "mxint8"],
)
def test_the_proofs_own_arithmetic_gives_the_same_factors(name: str) -> None:
    """Both divide in float32; only the power differs, by an ulp of float64."""
    spec = resolve(name if name in BY_ANY_NAME else declared_by_name(name, {}))
    for x in (wild(torch.bfloat16, 70, 130), hard_float32(64)):
        for axis in (0, 1):
            expected = dge_factors(x, spec, 5.0, axis, None)
            torch.testing.assert_close(
                derivative(x, spec, axis, 5.0, None), expected, rtol=1e-6, atol=0
            )


def test_the_slope_of_the_noise_is_that_of_its_variance() -> None:
    """Of E2M1 under the scale 4 of a block, by central differences; 0 at values of the format, and at the largest."""
    v = np.linspace(-5.99, 5.99, 510)
    x = torch.tensor([*(4 * v), 24.0, 2.0])
    slopes = noise_slopes(x, resolve("mxfp4", block=512), 0, None)

    def variance(size: np.ndarray) -> np.ndarray:
        above = np.clip(np.searchsorted(E2M1, size, side="right"), 1, len(E2M1) - 1)
        return 16 * (size - E2M1[above - 1]) * (E2M1[above] - size)

    step = 1e-6
    slope = (variance(np.abs(v) + step) - variance(np.abs(v) - step)) / (8 * step) * np.sign(v)
    is_inside = np.abs(np.abs(v)[:, None] - E2M1).min(axis=1) > 2 * step
    assert is_inside.sum() > 490
    np.testing.assert_allclose(slopes[:510].numpy()[is_inside], slope[is_inside], atol=1e-5)
    assert slopes[510:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "name",
    ["mxfp4", "nvfp4", "fp8_e4m3", "hifp8", "nvfp4_16x16", "fp8_128x128", "int4_g128", "mxint8"],
)
def test_the_proofs_own_arithmetic_gives_the_same_slopes_of_the_noise(name: str) -> None:
    spec = resolve(name if name in BY_ANY_NAME else declared_by_name(name, {}))
    for x in (wild(torch.bfloat16, 70, 130), hard_float32(64)):
        for axis in (0, 1):
            assert_same(noise_slope(x, spec, axis, None), noise_slopes(x, spec, axis, None).float())


@pytest.mark.parametrize("name", ["nvfp4_16x16", "fp4_ue5m3", "mxint8", "int4_g128"])
def test_declared_formats(name: str) -> None:
    """A value of the grid lies at the end of its interval, where the slope is 1 / k."""
    x = torch.randn(40, 130, generator=torch.Generator().manual_seed(2))
    spec = resolve(declared_by_name(name, {}))
    y = quantise(x, spec, axis=1)
    # amax is on the grid, so quantised again the blocks keep their scales, but for an ulp of a division
    factors = dge_factors(y, spec, 5.0, 1, None)
    at_ends = (factors - 0.2).abs() < 1e-3
    assert at_ends.float().mean() > 0.95


def test_beyond_the_largest_value_it_is_zero_and_in_blocks_without_a_scale_one() -> None:
    x = torch.ones(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = 7.9, torch.nan, torch.inf
    factors = dge_factors(x, resolve("mxfp4"), 5.0, 1, None)
    assert factors[0, 0] == 0
    assert factors[0, 1] == pytest.approx(0.2)
    assert (factors[1:] == 1).all()

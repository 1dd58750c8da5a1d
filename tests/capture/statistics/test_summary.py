"""Statistics against numpy in wider arithmetic, and against the definitions of the formats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.capture.statistics import native, summary
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.histogram import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    QUANTILES,
    Histogram,
)
from quantexp.capture.statistics.summary import described, statistics
from quantexp.errors import ConfigError
from quantexp.formats import TwoLevelScales, encode, quantise
from tests.fake_gpu import on_fake_gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with the compiled code and with the torch code."""
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", lambda: None)


def sample(dtype: torch.dtype, *shape: int, spread: float = 3.0) -> Tensor:
    """Magnitudes over many binades, some zeros of either sign, skewed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) + 0.5
    x *= torch.exp2(torch.randn(shape, generator=generator) * spread)
    x[..., ::17] = 0.0
    x[..., 3::31] = -0.0
    return x.to(dtype)


def wide(x: Tensor) -> Any:
    return x.double().numpy().astype(np.longdouble).ravel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_are_numpys_in_wider_arithmetic(dtype: torch.dtype) -> None:
    x = sample(dtype, 50, 700)
    v, moments = wide(x), statistics(x)
    d = v - v.mean()
    assert (moments["count"], moments["zeros"]) == (v.size, int((v == 0).sum()))
    assert moments["zero_share"] == pytest.approx(float((v == 0).mean()))
    assert moments["mean"] == pytest.approx(float(v.mean()), rel=1e-12)
    assert moments["std"] == pytest.approx(float(v.std()), rel=1e-12)
    assert moments["skew"] == pytest.approx(float((d**3).mean() / v.std() ** 3), rel=1e-10)
    assert moments["kurtosis"] == pytest.approx(float((d**4).mean() / v.std() ** 4), rel=1e-10)
    assert (moments["min"], moments["max"]) == (v.min(), v.max())
    assert moments["abs_max"] == np.abs(v).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 1000, 99_999])
def test_quantiles_are_numpys(dtype: torch.dtype, count: int) -> None:
    x = sample(dtype, count)
    expected = np.quantile(x.double().numpy(), QUANTILES)
    quantiles = list(statistics(x)["quantiles"].values())
    # float32 is counted truncated to bfloat16: each of the two neighbours is low by up to 2^-7 of itself.
    relative = 2.0**-7 if dtype == torch.float32 else 1e-12
    neighbours = np.abs(np.quantile(np.abs(x.double().numpy()), 1.0)) if count < 4 else 0
    np.testing.assert_allclose(quantiles, expected, rtol=relative, atol=neighbours * 2**-7 + 1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitudes_are_counted_by_their_binade(dtype: torch.dtype) -> None:
    x = sample(dtype, 40_000, spread=40.0)
    v = np.abs(x.double().numpy())
    v = v[(v > 0) & np.isfinite(v)]
    exponents = np.frexp(v)[1] - 1
    histogram = statistics(x)["log2_magnitude"]
    bins = range(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
    expected = {e: int((exponents == e).sum()) for e in bins}
    counted = {histogram["first"] + i: c for i, c in enumerate(histogram["counts"])}
    assert {e: counted.get(e, 0) for e in bins} == expected
    assert histogram["counts"][0] > 0 < histogram["counts"][-1]
    assert histogram["below"] == int((exponents < LOWEST_EXPONENT).sum())
    assert histogram["above"] == int((exponents > HIGHEST_EXPONENT).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_of_a_dtype_is_counted_once(dtype: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    x = (bits << 16).view(dtype) if dtype == torch.float32 else bits.to(torch.int16).view(dtype)
    counts, v = statistics(x), x.double().numpy()
    finite = v[np.isfinite(v)]
    assert (counts["nan"], counts["inf"]) == (np.isnan(v).sum(), np.isinf(v).sum())
    assert counts["nonfinite"] == v.size - finite.size
    assert (counts["min"], counts["max"]) == (finite.min(), finite.max())
    assert counts["zeros"] == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_are_counted_and_left_out(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, float("nan"), 0.0, float("inf"), -3.0, -float("inf")]).to(dtype)
    summary = statistics(x)
    assert (summary["count"], summary["zeros"], summary["nonfinite"]) == (6, 1, 3)
    assert (summary["nan"], summary["inf"]) == (1, 2)
    assert (summary["mean"], summary["min"], summary["max"]) == (pytest.approx(-2 / 3), -3, 1)


def test_a_nan_whose_upper_half_looks_infinite_is_one() -> None:
    x = torch.tensor([0x7F800001, 0x7F800000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    summary = statistics(x)
    assert (summary["nan"], summary["inf"], summary["mean"]) == (1, 1, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [None, "mxfp8", "hifp8"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (3,), ()])
def test_without_a_finite_element_there_are_no_moments(
    dtype: torch.dtype, chosen: str | None, shape: tuple[int, ...]
) -> None:
    x = torch.full(shape, float("nan"), dtype=dtype)
    summary = statistics(x, chosen_for(chosen, "input") if chosen else None)
    for key in ("mean", "std", "abs_max", "skew", "quantiles"):
        assert summary[key] is None
    assert summary["nonfinite"] == x.numel()
    if chosen:
        assert summary["fidelity"]["sqnr_db"] is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_has_no_spread_and_no_shape(dtype: torch.dtype) -> None:
    moments = statistics(torch.full((1000,), 0.1, dtype=dtype))
    assert moments["std"] == pytest.approx(0, abs=1e-9)
    assert moments["skew"] is None
    assert moments["kurtosis"] is None


def test_layout_does_not_matter() -> None:
    x = sample(torch.bfloat16, 30, 64)
    assert statistics(x) == statistics(x.t().contiguous().t()) == statistics(x[None, ::1])
    assert statistics(x[::2, ::3]) == statistics(x[::2, ::3].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp8_e5m2", "hifp8"])
@pytest.mark.parametrize("tensor", ["input", "value", "grad_output"])
def test_fidelity_is_that_of_quantising(dtype: torch.dtype, name: str, tensor: str) -> None:
    x = sample(dtype, 70, 3, 100)
    chosen = chosen_for(name, tensor)
    fidelity = statistics(x, chosen)["fidelity"]
    axis = 0 if tensor == "value" else -1
    options: dict[str, Any] = (
        {"scaling": "current", "amax_target": 224.0 if tensor == "grad_output" else 15.0}
        if name == "hifp8"
        else {"scale_rule": "floor" if name == "mxfp4" else "rceil"}
    )
    v, q = wide(x), wide(quantise(x, name, axis=axis, **options))
    # Squares are summed in float32 over 2^16 elements at a time: 2^16 roundings of 2^-24 at the very most.
    near: dict[str, Any] = {"rel": 2.0**-8}
    assert fidelity["axis"] == axis
    noise = ((v - q) ** 2).sum()
    assert fidelity["sqnr_db"] == pytest.approx(
        float(10 * np.log10((v**2).sum() / noise)), abs=10 * np.log10(1 + 2**-7)
    )
    cosine = (v * q).sum() / np.sqrt((v**2).sum() * (q**2).sum())
    # The difference from 1 is about the noise's share of the signal.
    assert 1 - fidelity["cosine"] == pytest.approx(float(1 - cosine), abs=1e-5, **near)
    nonzero = (v != 0).sum()
    assert fidelity["underflow_share"] == ((v != 0) & (q == 0)).sum() / nonzero
    if name == "hifp8":
        assert "scale_exponents" not in fidelity
        return
    _, scales = encode(x, name, axis=axis, **options)
    expected = np.bincount(scales.numpy().ravel(), minlength=256)
    histogram = fidelity["scale_exponents"]
    first = histogram["first"] + 127
    assert histogram["counts"] == expected[first : first + len(histogram["counts"])].tolist()
    assert sum(histogram["counts"]) == scales.numel()
    assert fidelity["nan_blocks"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor", ["input", "value"])
def test_fidelity_of_two_levels_of_scales(dtype: torch.dtype, tensor: str) -> None:
    """nvfp4: the exponent of a block is that of the E4M3 scale, as ml_dtypes reads it, times the tensor's."""
    x = sample(dtype, 70, 3, 100)
    x[5] = 0
    fidelity = statistics(x, chosen_for("nvfp4", tensor))["fidelity"]
    axis = 0 if tensor == "value" else -1
    v, q = wide(x), wide(quantise(x, "nvfp4", axis=axis))
    assert fidelity["sqnr_db"] == pytest.approx(
        float(10 * np.log10((v**2).sum() / ((v - q) ** 2).sum())), abs=10 * np.log10(1 + 2**-7)
    )
    assert fidelity["underflow_share"] == ((v != 0) & (q == 0)).sum() / (v != 0).sum()
    _, scales = encode(x, "nvfp4", axis=axis)
    assert isinstance(scales, TwoLevelScales)
    # A scale is the float32 product of the two, and so is the largest value that it gives.
    block = scales.block.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    value = block * np.float32(scales.tensor)
    assert fidelity["saturated_share"] == _share_beyond(
        x.double().numpy(), np.float32(6) * value, axis
    )
    magnitude = x.double().abs().numpy()
    is_zero = np.maximum.reduceat(magnitude, range(0, x.shape[axis], 16), axis=axis) == 0
    exponents = np.floor(np.log2(value[~is_zero])).astype(int)
    histogram = fidelity["scale_exponents"]
    counts = dict(enumerate(histogram["counts"], histogram["first"]))
    expected = np.unique_counts(exponents)
    assert {k: n for k, n in counts.items() if n and k != -127} == dict(
        zip(expected.values.tolist(), expected.counts.tolist(), strict=True)
    )
    assert counts.get(-127, 0) == is_zero.sum()
    assert fidelity["nan_blocks"] == 0


def _share_beyond(v: Any, limit: Any, axis: int) -> float:
    """The share of elements beyond the limit of their block of 16."""
    each = np.repeat(limit, 16, axis=axis)[tuple(slice(0, n) for n in v.shape)]
    return float((np.abs(v) > each).mean())


def test_saturated_elements_lie_beyond_the_largest_at_their_scale() -> None:
    # floor: amax 7.9 has s = 0, and E2M1's largest is 6; the second block's 8 has s = 1.
    x = torch.tensor([7.9, 6.5, 6.0, 1.0] + [0.0] * 28 + [8.0, 7.9] + [0.0] * 30)
    fidelity = statistics(x, chosen_for("mxfp4", "input"))["fidelity"]
    assert fidelity["saturated_share"] == 2 / 64
    assert fidelity["scale_exponents"] == {"first": 0, "counts": [1, 1]}
    assert statistics(x, chosen_for("mxfp8", "input"))["fidelity"]["saturated_share"] == 0


def test_a_block_with_nan_is_counted_and_left_out() -> None:
    x = torch.ones(96)
    x[40], x[70] = float("nan"), float("inf")
    fidelity = statistics(x, chosen_for("mxfp8", "input"))["fidelity"]
    assert fidelity["nan_blocks"] == 2
    assert fidelity["signal"] == 32
    assert fidelity["noise"] == 0


def test_a_format_that_does_not_quantise_cannot_be_chosen() -> None:
    for name in ("bf16", "mxfp9"):
        with pytest.raises(ConfigError, match=rf"capture.format must be one of .*, got '{name}'"):
            chosen_for(name, "input")


def on_gpu(device: torch.device, *, exact: bool) -> Histogram:
    values, counts = (
        torch.empty(9, dtype=torch.float64, device=device),
        torch.empty(9, device=device),
    )
    none = torch.empty((), dtype=torch.int64, device=device)
    return Histogram(values, counts.to(torch.int64), none, none, exact)


@pytest.mark.parametrize("exact", [True, False], ids=["bf16", "fp32"])
def test_on_a_gpu_statistics_take_few_operations_and_copy_their_shares_once(exact: bool) -> None:
    def describe(device: torch.device) -> None:
        x = torch.empty(
            14336, 4096, dtype=torch.bfloat16 if exact else torch.float32, device=device
        )
        described(x, on_gpu(device, exact=exact))

    summary._shares.cache_clear()
    try:
        operations = on_fake_gpu(lambda device: [describe(device), describe(device)])
    finally:
        summary._shares.cache_clear()  # it holds a fake tensor
    assert sum(name.endswith("!") for name in operations) == 1
    # 2 x 14 chunks of 2^22 elements with some 25 operations each; 224 chunks of 2^18 would take 11,000.
    assert len(operations) < 1200

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped, unused-ignore]
import torch

from quantexp.analysis.draw.spread import edge_of, magnitude_bars, normal_points, quantiles
from quantexp.capture.statistics.histogram import Histogram, histogram


def test_bars_are_numpys_histogram_of_the_magnitudes() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:100] = 0
    bars = magnitude_bars(histogram(x))
    assert bars is not None
    values = x.double().numpy()
    octaves = np.diff(np.log2(bars.edges))
    for heights, chosen in (
        (bars.positive, values[values > 0]),
        (bars.negative, values[values < 0]),
    ):
        counts, _ = np.histogram(np.abs(chosen), bars.edges)
        assert heights == pytest.approx(counts / len(values) / octaves)
    assert 0 < np.abs(values[values != 0]).min() >= bars.edges[0]
    assert np.abs(values).max() <= bars.edges[-1]


def test_bars_begin_at_quarters_of_an_octave() -> None:
    assert [edge_of(i) for i in (-1, 0, 1, 2, 3, 4)] == [0.875, 1, 1.25, 1.5, 1.75, 2]


@pytest.mark.parametrize("x", [torch.zeros(4), torch.empty(0), torch.full((2,), torch.nan)])
def test_without_a_magnitude_there_are_no_bars_and_no_quantiles(x: torch.Tensor) -> None:
    counted = histogram(x)
    assert magnitude_bars(counted) is None
    assert quantiles(counted, torch.tensor([0.5]), magnitudes=True).numel() == 0


def test_quantiles_are_elements_and_those_of_numpy() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(2)).to(torch.float16)
    shares = torch.tensor([0, 0.1, 0.5, 0.9, 1], dtype=torch.float64)
    elements = quantiles(histogram(x), shares)
    wanted = np.quantile(x.double().numpy(), shares.numpy(), method="closest_observation")
    nearest = np.quantile(x.double().numpy(), shares.numpy(), method="nearest")
    assert all(f in (w, n) for f, w, n in zip(elements.tolist(), wanted, nearest, strict=True))
    magnitudes = quantiles(histogram(x), torch.tensor([0.0, 1.0]), magnitudes=True)
    nonzero = x[x != 0].abs().double()
    assert magnitudes.tolist() == [nonzero.min(), nonzero.max()]


def test_points_against_a_normal_are_scipys_quantiles() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3)).bfloat16()
    z, value = normal_points(histogram(x), 101)
    ordered = np.sort(x.double().numpy())
    rank = np.round(scipy.stats.norm.cdf(z.numpy()) * len(x) - 0.5).astype(int)
    assert z.numpy() == pytest.approx(scipy.stats.norm.ppf((rank + 0.5) / len(x)), abs=1e-9)
    assert value.tolist() == ordered[rank].tolist()
    assert (rank[0], rank[-1]) == (0, len(x) - 1)


def test_points_of_more_elements_than_float32_can_count_are_finite() -> None:
    counts = torch.tensor([1, 10**9, 1])
    none = torch.tensor(0)
    counted = Histogram(torch.tensor([-1.0, 0.0, 1.0]).double(), counts, none, none, exact=True)
    z, value = normal_points(counted, 51)
    assert bool(z.isfinite().all())
    assert float(z[-1]) == pytest.approx(scipy.stats.norm.isf(0.5 / (10**9 + 2)), rel=1e-6)
    assert (float(value[0]), float(value[-1])) == (-1, 1)


def test_an_empty_tensor_has_no_points() -> None:
    z, value = normal_points(histogram(torch.empty(0)), 11)
    assert z.numel() == value.numel() == 0

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.analysis.moments import Moments, chunk_moments


def numpy_moments(x: np.ndarray) -> list[float]:
    d = x - x.mean()
    return [x.mean(), (d**2).sum(), (d**3).sum(), (d**4).sum(), x.min(), x.max()]


def as_list(m: Moments) -> list[float]:
    return [m.mean, m.m2, m.m3, m.m4, m.min, m.max]


@pytest.mark.parametrize("sizes", [(1000,), (1, 999), (500, 500), (3, 90, 900, 7)])
def test_merged_chunks_are_the_moments_of_the_whole(sizes: tuple[int, ...]) -> None:
    x = torch.randn(sum(sizes), dtype=torch.float64).exp_()
    merged = Moments()
    for part in x.split(list(sizes)):
        merged += chunk_moments(part)
    # 1e-10: some thousand float64 roundings of 1e-16, m3 losing a few digits to cancellation.
    np.testing.assert_allclose(as_list(merged), numpy_moments(x.numpy()), rtol=1e-10)
    assert merged.count == sum(sizes)


def test_chunks_of_different_means_merge() -> None:
    a, b = torch.full((10,), -3.0), torch.full((30,), 5.0)
    merged = chunk_moments(a) + chunk_moments(b)
    expected = numpy_moments(torch.cat([a, b]).numpy().astype(np.float64))
    np.testing.assert_allclose(as_list(merged), expected, rtol=1e-13)


def test_an_empty_chunk_changes_nothing() -> None:
    some = chunk_moments(torch.tensor([1.0, 2.0]))
    none = chunk_moments(torch.zeros(0))
    assert some + none == some == none + some


def test_equal_values_have_no_spread_whatever_their_number() -> None:
    third = torch.full((999_983,), 1 / 3, dtype=torch.float32)
    moments = chunk_moments(third)
    assert (moments.m2, moments.m4) == (0.0, 0.0)
    assert moments.mean == float(third[0])


def test_the_chunk_itself_is_left_alone() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    chunk_moments(x)
    assert x.tolist() == [1.0, 2.0]

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.capture.statistics import statistics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments_are_numpys_in_float64(dtype: torch.dtype) -> None:
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    expected = x.double().numpy()
    found = statistics(x)
    assert found["mean"] == pytest.approx(expected.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(expected.std(), rel=1e-9)
    assert (found["min"], found["max"]) == (expected.min(), expected.max())
    assert found["abs_max"] == np.abs(expected).max()


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    x = torch.tensor([1.0, float("nan"), 0.0, float("inf"), -3.0])
    found = statistics(x)
    assert (found["count"], found["zeros"], found["nonfinite"]) == (5, 1, 2)
    assert (found["mean"], found["min"], found["max"]) == (pytest.approx(-2 / 3), -3, 1)


@pytest.mark.parametrize("x", [torch.empty(0), torch.full((3,), float("nan"))])
def test_without_a_finite_element_there_are_no_moments(x: torch.Tensor) -> None:
    found = statistics(x)
    assert found["mean"] is None
    assert found["abs_max"] is None
    assert found["nonfinite"] == x.numel()


def test_a_constant_has_no_spread() -> None:
    assert statistics(torch.full((1000,), 0.1))["std"] == pytest.approx(0, abs=1e-9)

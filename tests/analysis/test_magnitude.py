from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.analysis.magnitude import EXPONENTS, MagnitudeHistogram, magnitude_histogram

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def count_at(histogram: MagnitudeHistogram, exponent: int) -> int:
    return histogram.counts[EXPONENTS.index(exponent)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_fall_into_the_bin_of_their_exponent(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -1.5, 2.0, 3.99, -0.5, 2.0**-14], dtype=dtype)
    histogram = magnitude_histogram(x)
    at = {e: count_at(histogram, e) for e in (-14, -1, 0, 1)}
    rounded_up = 1 if float(x[3]) == 4.0 else 0
    assert at == {-14: 1, -1: 1, 0: 2, 1: 2 - rounded_up}
    assert histogram.finite == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_ends_of_the_bins_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([2.0**-40, 2.0**-41, 2.0**40, 2.0**41], dtype=dtype)
    histogram = magnitude_histogram(x)
    assert (count_at(histogram, -40), count_at(histogram, 40)) == (1, 1)
    assert (histogram.underflow, histogram.overflow) == (1, 1)


def test_the_histogram_agrees_with_numpys_frexp() -> None:
    x = torch.randn(10_000) * 2.0 ** torch.randint(-60, 60, (10_000,))
    _, exponent = np.frexp(x.numpy().astype(np.float64))
    expected = [int((exponent - 1 == e).sum()) for e in EXPONENTS]
    assert list(magnitude_histogram(x).counts) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_signed_zeros_and_subnormals_are_told_apart(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-130], dtype=dtype)
    histogram = magnitude_histogram(x)
    assert (histogram.zeros, histogram.underflow, sum(histogram.counts)) == (2, 1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_counted_apart(dtype: torch.dtype) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], dtype=dtype)
    histogram = magnitude_histogram(x)
    assert (histogram.nonfinite, histogram.finite) == (3, 1)


def test_all_bf16_codes_are_counted_once() -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    histogram = magnitude_histogram(codes.view(torch.bfloat16))
    assert set(histogram.counts) == {2 * 128}
    assert (histogram.zeros, histogram.nonfinite) == (2, 2 * 128)
    assert histogram.finite + histogram.nonfinite == 2**16


def test_an_empty_tensor_has_an_empty_histogram() -> None:
    assert magnitude_histogram(torch.zeros(0, 3)) == MagnitudeHistogram()


def test_shares_are_of_the_finite_elements_zeros_included() -> None:
    histogram = magnitude_histogram(torch.tensor([0.0, 1.0, 1.0, 2.0, float("inf")]))
    assert histogram.shares[EXPONENTS.index(0)] == 0.5
    assert sum(MagnitudeHistogram().shares) == 0


def test_two_histograms_add_up_to_that_of_both() -> None:
    a, b = torch.randn(100), torch.tensor([0.0, float("nan"), 2.0**-50, 2.0**50])
    both = magnitude_histogram(torch.cat([a, b]))
    assert magnitude_histogram(a) + magnitude_histogram(b) == both


def test_other_dtypes_are_counted_by_value() -> None:
    assert count_at(magnitude_histogram(torch.tensor([4, -5])), 2) == 2
    assert count_at(magnitude_histogram(torch.ones(2).to(torch.float8_e4m3fn)), 0) == 2


def test_a_transposed_tensor_has_the_same_histogram() -> None:
    x = torch.randn(8, 16).to(torch.bfloat16)
    assert magnitude_histogram(x.T) == magnitude_histogram(x)

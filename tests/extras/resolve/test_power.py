"""The smallest gap that a design detects, against the noncentral t distribution of scipy and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from quantexp.extras.resolve.power import POWER, power, smallest_gap


@pytest.mark.parametrize("freedom", [1, 2, 5, 11, 60])
@pytest.mark.parametrize("noncentrality", [0.0, 0.7, 3.0, 9.0])
def test_the_power_is_that_of_scipy(freedom: int, noncentrality: float) -> None:
    """Simpson's rule over 400 intervals of a smooth density: far below the 1e-6 that a plan could show."""
    critical = stats.t.ppf(0.975, freedom)
    tails = stats.nct.sf(critical, freedom, noncentrality)
    if noncentrality < 5:  # scipy's lower tail is nan far from zero, where it is below 1e-12
        tails += stats.nct.cdf(-critical, freedom, noncentrality)
    assert power(noncentrality, freedom) == pytest.approx(tails, abs=1e-6)


@pytest.mark.parametrize("n", [2, 3, 6, 12])
def test_the_smallest_gap_is_found_with_the_power(n: int) -> None:
    gap = smallest_gap(0.25, n)
    found = stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, gap / (0.25 / math.sqrt(n)))
    # The lower tail, which is left out here, is below 1e-4 from three values on, and below 1e-2 for two.
    assert found == pytest.approx(POWER, abs=1e-2 if n == 2 else 1e-4)


def test_four_of_five_designs_detect_it() -> None:
    """20,000 experiments: the standard error of a share of 0.8 is 0.0028."""
    values = np.random.default_rng(0).normal(smallest_gap(1.0, 6), 1.0, (20_000, 6))
    p_values = stats.ttest_1samp(values, 0.0, axis=1).pvalue
    assert (p_values < 0.05).mean() == pytest.approx(POWER, abs=4 * 0.0028)


def test_no_spread_detects_anything() -> None:
    assert smallest_gap(0.0, 6) == 0.0

"""Intervals and tests over seeds, against scipy and against noise whose truth is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from quantexp.analysis.compare.noise import (
    FEWEST_ALONE,
    MOST_SEEDS,
    floor_of,
    half_width,
    holm,
    interval,
    is_clear,
    is_sound,
    mean_p_value,
    seeds_needed,
    sign_flip_p_value,
    skew_p_value,
    t_quantile,
)

VALUES = [
    [0.3, 0.1, 0.25],
    [0.02, -0.01, 0.005, 0.011, 0.0, -0.002],
    [1e-6, 2e-6, -3e-6, 1e-6, 5e-6, 4e-6, 1e-6],
]


@pytest.mark.parametrize("values", VALUES)
def test_interval_and_p_value_are_those_of_scipy(values: Sequence[float]) -> None:
    expected = stats.ttest_1samp(values, 0.0)
    assert mean_p_value(values) == pytest.approx(float(expected.pvalue), rel=1e-9)
    bounds = expected.confidence_interval(0.95)
    assert interval(values) == pytest.approx((bounds.low, bounds.high), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 999])
def test_quantiles_are_those_of_scipy(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=1e-9)


def test_equal_values_are_certain() -> None:
    assert mean_p_value([0.5, 0.5, 0.5]) == 0.0
    assert mean_p_value([0.0, 0.0, 0.0]) == 1.0
    assert interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


@pytest.mark.parametrize("values", VALUES[1:])
def test_sign_flips_are_those_of_scipy(values: Sequence[float]) -> None:
    expected = stats.permutation_test(
        (np.array(values),), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip_p_value(values) == pytest.approx(float(expected.pvalue))


def test_few_seeds_allow_no_sign_flip_test() -> None:
    assert sign_flip_p_value([1.0] * 5) is None, "2 of 32 is more than 5%"
    assert sign_flip_p_value([1.0] * 6) == 2 / 64
    assert sign_flip_p_value([1.0] * 21) is None


def test_holm_multiplies_the_least_p_value_by_the_number_and_stays_in_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_seeds_needed_are_the_least_whose_interval_leaves_zero_out() -> None:
    for mean, deviation in itertools.product([0.5, -1.0], [0.5, 2.0]):
        n = seeds_needed(mean, deviation)
        assert n is not None
        assert half_width(deviation, n) < abs(mean)
        assert n == FEWEST_ALONE or half_width(deviation, n - 1) >= abs(mean)
    assert seeds_needed(1.0, 0.0) == FEWEST_ALONE
    assert seeds_needed(0.0, 1.0) is None
    assert half_width(1.0, MOST_SEEDS) > 0.19
    assert seeds_needed(0.19, 1.0) is None


def test_the_floor_is_exceeded_by_one_difference_in_twenty() -> None:
    """Of 4000 floors from four differences each, a fifth difference exceeds 5%; the standard error is 0.34%."""
    draws = np.random.default_rng(1).normal(size=(4000, 5))
    exceeded = [abs(row[4]) > (floor_of(list(row[:4])) or math.inf) for row in draws]
    assert np.mean(exceeded) == pytest.approx(0.05, abs=4 * 0.0034)
    assert floor_of([]) is None
    assert floor_of([0.0, 0.0]) == 0.0


def test_values_are_sound_if_their_signs_agree_and_no_tail_reaches_towards_zero() -> None:
    assert not is_sound([1.0, 1.1, 0.9, 1.0, 1.1]), "five have one sign by chance in 2 of 32 cases"
    assert is_sound([1.0, 1.1, 0.9, 1.0, 1.1, 0.9])
    assert not is_sound([-1.0, -1.1, -1.0, -1.1, -1.0, -0.2])
    assert is_sound([-1.0, -1.1, -1.0, -1.1, -1.0, -2.0])
    assert not is_sound([1.0, 1.1, 0.9, 1.0, -0.5, 0.6])


def test_without_a_tail_towards_zero_the_correction_costs_degrees_of_freedom_alone() -> None:
    away = [1.0, 1.1, 0.9, 1.0, 1.1, 3.0, 1.0, 0.8]
    t = np.mean(away) / stats.sem(away)
    assert skew_p_value(away) == pytest.approx(2 * stats.t.sf(t, 8 - 16 / 8))
    assert skew_p_value([2.0] * 8) == 0
    assert skew_p_value([0.0] * 8) == 1


def test_a_longer_tail_towards_zero_never_tells_more() -> None:
    """Values of one mean and standard deviation, of more and more skewness."""
    before = 0.0
    for power in np.linspace(1, 6, 30):
        shape = -(np.arange(1, 9) ** power)
        values = 1.2 + 0.5 * (shape - shape.mean()) / shape.std(ddof=1)
        p_value = skew_p_value(values.tolist())
        assert p_value >= before - 1e-12
        before = p_value


@pytest.mark.parametrize("n", [6, 7, 8, 10, 12])
@pytest.mark.parametrize(
    ("noise", "level"),
    [("normal", 0.05), ("t", 0.05), ("uniform", 0.05), ("exponential", 0.05), ("lognormal", 0.065)],
)
def test_noise_of_any_shape_is_rarely_sound(noise: str, level: float, n: int) -> None:
    """1,000 samples of mean zero; the bound is three standard errors above the level."""
    rng = np.random.default_rng(n)
    draws: dict[str, Callable[[tuple[int, int]], np.ndarray]] = {
        "normal": rng.standard_normal,
        "t": lambda shape: rng.standard_t(3, shape),
        "uniform": lambda shape: rng.uniform(-1, 1, shape),
        "exponential": lambda shape: rng.exponential(size=shape) - 1,
        "lognormal": lambda shape: np.exp(rng.normal(size=shape)) - math.exp(0.5),
    }
    samples = draws[noise]((1000, n)).tolist()
    found = np.mean([mean_p_value(x) < 0.05 and is_sound(x) for x in samples])
    assert found <= level + 3 * math.sqrt(level * (1 - level) / 1000)


@pytest.mark.parametrize(("n", "share"), [(6, 0.40), (8, 0.55), (12, 0.68)])
def test_bell_shaped_differences_are_found(n: int, share: float) -> None:
    """Of the size that Student's t finds in 80%: 42, 58 and 71% of 150,000 samples; three standard errors are 4.5%."""
    rng, critical = np.random.default_rng(n), stats.t.ppf(0.975, n - 1)
    distances = np.linspace(1, 5, 4001)
    shares = stats.nct.sf(critical, n - 1, distances)
    distance = distances[np.argmin(np.abs(shares - 0.8))] / math.sqrt(n)
    samples = (rng.normal(size=(1000, n)) + distance).tolist()
    found = np.mean([mean_p_value(x) < 0.05 and is_sound(x) for x in samples])
    assert found >= share - 0.03


def test_values_are_clear_of_a_floor_if_all_of_their_interval_is_and_they_spread_no_more() -> None:
    gaps = [-1.0, -1.1, -0.9]
    assert is_clear(gaps, 0.7, 0.06)
    assert not is_clear(gaps, 0.8, 0.05), "the interval ends at -0.75"
    assert not is_clear(gaps, 0.7, 0.04)

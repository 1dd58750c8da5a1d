"""How far a value lies beyond the recent past."""

from __future__ import annotations

import math
import random

import pytest

from quantexp.capture.past import FEWEST, Past, centre_and_deviation


def test_deviation_is_the_standard_deviation_of_normal_values() -> None:
    # The MAD of 20,000 normal values has a relative standard error of 1.17 / sqrt(2 n) = 0.6% (Rousseeuw and Croux,
    # 1993, table 2: efficiency 37%), so 3% is five of them.
    draws = random.Random(1)
    values = [draws.gauss(5.0, 2.0) for _ in range(20_000)]
    median, deviation = centre_and_deviation(values)
    assert median == pytest.approx(5.0, abs=0.1)
    assert deviation == pytest.approx(2.0, rel=0.03)


def test_spikes_of_the_past_do_not_hide_the_next_one() -> None:
    past = Past(64)
    for index in range(32):
        past.add(1000.0 if index % 8 == 7 else 3.0 + 0.01 * (index % 5))
    far = past.deviations(10.0)
    assert far is not None
    assert far > 100


def test_there_is_no_deviation_before_enough_values_nor_of_a_value_that_is_not_finite() -> None:
    past = Past(64)
    for index in range(FEWEST - 1):
        past.add(float(index))
        past.add(math.nan)
    assert past.deviations(1e9) is None
    past.add(0.0)
    assert past.deviations(1e9) is not None
    assert past.deviations(math.inf) is None


def test_only_the_window_counts() -> None:
    past = Past(16)
    for value in [100.0] * 50 + [1.0] * 16:
        past.add(value)
    assert past.median == 1.0


def test_constant_past_has_a_deviation() -> None:
    assert centre_and_deviation([2.0] * 20) == (2.0, 0.002)
    assert centre_and_deviation([0.0] * 20) == (0.0, 1e-12)

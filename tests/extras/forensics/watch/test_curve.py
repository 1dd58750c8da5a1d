"""Losses with arrays are those of the comparison, which is their oracle."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from quantexp.analysis.compare.gap import Gap, gap_to
from quantexp.analysis.report.series import XY
from quantexp.extras.forensics.watch.curve import Curve, gap, late_mean
from quantexp.runs.metrics import LossCurve, loss_curve


def line(count: int, seed: int = 1) -> XY:
    noise = random.Random(seed)
    y = [5 / (1 + i) + noise.gauss(0, 0.1) for i in range(count)]
    return np.arange(1, count + 1), np.array(y)


def test_of_an_iteration_that_was_repeated_the_last_loss_counts() -> None:
    lines: list[dict[str, Any]] = [
        {"iteration": i, "loss": loss}
        for i, loss in [
            (1, 5.0),
            (2, 4.0),
            (3, None),
            (4, 3.0),
            (3, 3.5),
            (4, 3.4),
            (6, 3.0),
            (5, 2.0),
        ]
    ]
    expected = loss_curve(lines)
    for pieces in ([8], [4, 4], [1] * 8, [3, 2, 3]):
        curve, left = Curve(), list(lines)
        for size in pieces:
            part, left = left[:size], left[size:]
            losses = [math.nan if one["loss"] is None else one["loss"] for one in part]
            curve.add([one["iteration"] for one in part], losses)
        x, y = curve.finite
        assert (tuple(x), tuple(y)) == (expected.iterations, expected.losses)
        assert curve.num_nonfinite == len(expected.nonfinite) == 0


def test_losses_that_are_not_finite_are_counted_and_left_out() -> None:
    curve = Curve()
    curve.add([1, 2, 3], [5.0, math.nan, math.inf])
    assert (curve.finite[0].tolist(), curve.num_nonfinite, len(curve)) == ([1], 2, 3)
    curve.clear()
    assert (len(curve), curve.finite[0].tolist()) == (0, [])


def test_a_curve_grows_past_its_room() -> None:
    curve = Curve()
    for start in range(0, 5000, 100):
        curve.add(range(start, start + 100), [float(i) for i in range(start, start + 100)])
    x, y = curve.finite
    assert x.tolist() == y.tolist() == list(range(5000))


def test_the_gap_is_that_of_the_comparison() -> None:
    here, baseline = line(50, 1), line(70, 2)
    baseline = np.delete(baseline[0], [3, 4]), np.delete(baseline[1], [3, 4])
    curves = [LossCurve(tuple(x.tolist()), tuple(y.tolist())) for x, y in (here, baseline)]
    expected = gap_to(*curves)
    assert isinstance(expected, Gap)
    x, y = gap(here, baseline)
    assert (tuple(x), tuple(y)) == (expected.iterations, expected.gaps)
    assert late_mean((x, y)) == pytest.approx(expected.late)


def test_runs_without_a_common_iteration_have_no_gap() -> None:
    x, y = line(10)
    assert len(gap((x, y), (x + 10, y))[0]) == 0

"""Rises, margins and excesses of loss curves in numbers that can be computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from quantexp.extras.bisect.trouble import (
    Step,
    excess_of,
    is_nonfinite,
    margin_of,
    rise_after,
    rises_of,
    steps_of,
    trouble_in,
)
from quantexp.runs.paths import RunDir


def curve(*losses: float, first: int = 1) -> list[Step]:
    return [Step(first + i, loss) for i, loss in enumerate(losses)]


def test_a_falling_curve_never_rises() -> None:
    assert all(rise < 0 for rise in rises_of(curve(5, 4, 3, 2, 1)).values())
    assert rises_of(curve(5)) == {}


def test_a_rise_is_above_the_lowest_median_before() -> None:
    rises = rises_of(curve(4, 2, 2, 9, 9, 9, 9, 9, 9))
    assert rises[4] == 7.0  # above the median of 4, 2, 2
    assert rises[9] == 7.0  # the level stays where it has been


def test_the_margin_is_six_deviations_of_differences() -> None:
    steps = curve(*[3.0, 3.1] * 10)
    # Differences alternate +0.1 and -0.1 about a median of 0.1, the more frequent one.
    assert margin_of(steps) == pytest.approx(0.003, rel=0.5)
    spread = curve(1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.3, 1.0, 0.9)
    differences = [0.1, -0.2, 0.3, -0.4, 0.2, 0.3, -0.3, -0.1]
    middle = (-0.1 + 0.1) / 2
    absolute = sorted(abs(d - middle) for d in differences)
    expected = 6 * 1.4826 * (absolute[3] + absolute[4]) / 2
    assert margin_of(spread) == pytest.approx(expected)


def test_few_losses_give_a_tenth_and_none_no_margin() -> None:
    assert margin_of(curve(3, 2)) == pytest.approx(0.2)
    assert margin_of([]) == math.inf
    assert margin_of(curve(*[2.0] * 9)) == pytest.approx(0.002)


def test_the_excess_is_over_the_same_iteration_in_bf16() -> None:
    assert excess_of(curve(3, 5, first=4), curve(3, 4, first=4)) == 1.0
    assert excess_of(curve(3, math.nan), curve(3, 4)) == math.inf
    assert excess_of(curve(3, math.nan), curve(3, math.nan)) == 0.0
    assert excess_of([], []) == -math.inf


def test_a_replays_rise_counts_the_run_before_it() -> None:
    history = curve(2, 2, 2)
    assert rise_after(history, curve(7, first=4)) == 5.0
    assert rise_after([], curve(7, 8)) == 1.0
    assert rise_after([], []) == -math.inf


def test_the_first_step_that_is_not_finite_comes_before_every_rise() -> None:
    trouble = trouble_in([*curve(2, 9), Step(3, 9.0, is_left_out=True), Step(4, math.nan)])
    assert trouble is not None
    assert (trouble.measure, trouble.iteration) == ("nonfinite", 3)
    assert trouble.words == "the first step left out is iteration 3"
    trouble = trouble_in(curve(2, 2, 3, 9, 2))
    assert trouble is not None
    assert (trouble.measure, trouble.iteration) == ("loss", 4)
    assert trouble.words == "the largest rise of the loss, +7.0000, is at iteration 4"
    assert trouble_in(curve(2)) is None


def test_a_lower_loss_scale_is_no_trouble(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    lines = [
        {"iteration": 1, "loss": 3.0, "skipped": True, "loss_scale": 1024.0},
        {"iteration": 2, "loss": 3.0, "skipped": True, "loss_scale": 1.0},
        {"iteration": 3, "loss": None, "skipped": True, "loss_scale": 1024.0},
        {"iteration": 4, "loss": 3.0},
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = steps_of(run)
    assert [step.is_nonfinite for step in steps] == [False, True, True, False]
    assert is_nonfinite(steps)
    assert not is_nonfinite(steps[-1:])

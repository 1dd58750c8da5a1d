from __future__ import annotations

import numpy as np

from quantexp.analysis.compare.gap import gap_to, milestones, running_mean, window_of
from quantexp.runs.metrics import LossCurve


def test_gaps_are_paired_by_iteration() -> None:
    gap = gap_to(LossCurve((1, 2, 4), (3.0, 2.5, 2.0)), LossCurve((2, 3, 4), (2.0, 9.0, 1.0)))
    assert gap is not None
    assert (gap.iterations, gap.gaps) == ((2, 4), (0.5, 1.0))
    assert (gap.iteration, gap.last) == (4, 1.0)


def test_the_late_gap_is_the_mean_over_the_last_tenth() -> None:
    iterations = tuple(range(1, 31))
    here = LossCurve(iterations, tuple(float(i) for i in iterations))
    gap = gap_to(here, LossCurve(iterations, (0.0,) * 30))
    assert gap is not None
    assert (gap.num_late, gap.late, gap.last) == (3, 29.0, 30.0)


def test_without_common_iterations_there_is_no_gap() -> None:
    assert gap_to(LossCurve((1,), (1.0,)), LossCurve((2,), (1.0,))) is None
    assert gap_to(LossCurve(), LossCurve()) is None


def test_milestones_have_first_and_last() -> None:
    assert milestones(tuple(range(1, 21)), 5) == [1, 6, 11, 15, 20]
    assert milestones((1, 2, 3), 5) == [1, 2, 3]
    assert milestones((), 5) == []
    assert milestones((4, 5, 6), 1) == []
    assert milestones((4, 5, 6), -1) == []


def test_a_running_mean_covers_the_values_around_each_place() -> None:
    assert running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist() == [1.5, 3.0, 6.0, 7.5]
    assert running_mean(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]


def test_few_values_need_no_mean() -> None:
    assert [window_of(count) for count in (0, 199, 200, 5000)] == [1, 1, 4, 100]

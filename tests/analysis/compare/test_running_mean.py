from __future__ import annotations

import numpy as np

from quantexp.analysis.compare.running_mean import running_mean, window_of


def test_a_running_mean_covers_the_values_around_each_place() -> None:
    assert running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist() == [1.5, 3.0, 6.0, 7.5]
    assert running_mean(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]


def test_few_values_need_no_mean() -> None:
    assert [window_of(count) for count in (0, 199, 200, 5000)] == [1, 1, 4, 100]

from __future__ import annotations

from quantexp.analysis.report.series import thinned


def test_short_lines_stay_as_they_are() -> None:
    assert thinned([1, 2], [0.5, 0.25]) == [[1, 2], [0.5, 0.25]]


def test_spikes_first_and_last_survive_thinning() -> None:
    y = [1.0] * 100_000
    y[31_415] = 9.0
    y[27_182] = -9.0
    x = list(range(1, len(y) + 1))
    shown_x, shown_y = thinned(x, y)
    assert len(shown_x) == len(shown_y) <= 800
    assert {9.0, -9.0} <= set(shown_y)
    assert shown_x[shown_y.index(9.0)] == 31_416
    assert (shown_x[0], shown_x[-1]) == (1, 100_000)
    assert shown_x == sorted(shown_x)

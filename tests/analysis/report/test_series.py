from __future__ import annotations

import numpy as np

from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.lines import lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.report.series import drawn, series
from quantexp.folders import conf_dir
from tests.analysis.compare.runs import Runs


def test_short_lines_stay_as_they_are() -> None:
    assert drawn((np.array([1, 2]), np.array([0.5, 0.25])))["points"] == [[1, 2], [0.5, 0.25]]


def test_losses_are_not_rounded_before_they_are_shown() -> None:
    """3.35135 would be 3.3514 with four decimals, and the table beside it has 3.3513."""
    line = np.array([8]), np.array([3.3513495922088623])
    assert drawn(line)["points"] == [[8], [3.3513495922088623]]
    assert drawn(line, 6)["points"] == [[8], [3.35135]]


def test_spikes_first_and_last_survive_thinning() -> None:
    y = [1.0] * 100_000
    y[31_415] = 9.0
    y[27_182] = -9.0
    thin_x, thin_y = drawn((np.arange(1, len(y) + 1), np.array(y)))["points"]
    assert len(thin_x) == len(thin_y) <= 800
    assert {9.0, -9.0} <= set(thin_y)
    assert thin_x[thin_y.index(9.0)] == 31_416
    assert (thin_x[0], thin_x[-1]) == (1, 100_000)
    assert thin_x == sorted(thin_x)


def test_long_runs_have_a_mean_and_short_ones_none(runs: Runs) -> None:
    short, long = runs.add(), runs.add("FA_mxfp8", [float(i % 2) for i in range(5000)])
    one, other = series(lines_of(compare([read_side(short), read_side(long)])))
    assert (one["loss"]["window"], one["loss"]["mean"]) == (1, [[], []])
    assert other["loss"]["window"] == 100
    x, y = other["loss"]["mean"]
    assert 400 <= len(x) <= 420
    assert (x[0], x[-1]) == (1, 5000)
    assert all(0.48 < value < 0.52 for value in y), "around the mean of 0 and 1"
    assert one["gap"] == {"points": [[], []], "mean": [[], []], "window": 1, "band": None}


def test_seeds_of_a_scheme_are_one_line_with_a_band(runs: Runs) -> None:
    folders = [
        runs.add("FA_mxfp8", losses, seed=seed)
        for seed, losses in ((1, [6.0, 5.0]), (2, [6.5, 4.0]))
    ]
    (line,) = series(lines_of(compare([read_side(run) for run in folders])))
    assert line["label"] == "FA_mxfp8, 2 seeds"
    assert line["loss"]["points"] == [[1, 2], [6.25, 4.5]]
    assert line["loss"]["band"] == [[1, 2], [6.0, 4.0], [6.5, 5.0]]


def test_ten_schemes_are_drawn_in_ten_ways(runs: Runs) -> None:
    names = sorted(path.stem for path in (conf_dir() / "quant").glob("*.yaml"))
    lines = series(lines_of(compare([read_side(runs.add(name)) for name in names])))
    assert len({(line["colour"], *line["dash"]) for line in lines}) == len(names) == 10

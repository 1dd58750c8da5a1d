"""metrics.jsonl is followed: the losses are those of `loss_curve`, whatever the lines hold and however they come."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantexp.analysis.compare.gap import Gap, gap_to
from quantexp.analysis.report.series import XY
from quantexp.extras.forensics.watch import metrics as room
from quantexp.extras.forensics.watch.metrics import Curve, FollowedMetrics, gap, late_mean
from quantexp.runs.metrics import LossCurve, loss_curve, read_metrics, speed_of
from quantexp.runs.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def text_of(first: int, last: int) -> str:
    lines = [
        {"iteration": i, "loss": 5 - i / 100, "tokens_per_s": float(i), "memory_gb": 2.0}
        for i in range(first, last + 1)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def add(run: RunDir, text: str) -> None:
    with run.metrics.open("a") as stream:
        stream.write(text)


def read_all(followed: FollowedMetrics, most: int = 1 << 18) -> None:
    followed.read(most)
    while not followed.is_whole:
        followed.read(most)


@pytest.mark.parametrize("most", [100, 1000, 1 << 18])
def test_losses_and_latest_lines_are_those_of_the_file(run: RunDir, most: int) -> None:
    add(run, text_of(1, 250))
    followed = FollowedMetrics(run)
    read_all(followed, most)
    expected = loss_curve(read_metrics(run))
    x, y = followed.line
    assert (tuple(x), tuple(y)) == (expected.iterations, expected.losses)
    assert speed_of(followed.latest).tokens_per_s == speed_of(read_metrics(run)).tokens_per_s
    add(run, text_of(251, 260))
    assert followed.read() is True
    assert followed.line[0].tolist() == list(range(1, 261))
    assert followed.read() is False


def test_a_run_that_goes_on_from_a_checkpoint_loses_what_was_cut(run: RunDir) -> None:
    add(run, text_of(1, 50))
    followed = FollowedMetrics(run)
    read_all(followed)
    run.metrics.write_text(text_of(1, 20))
    read_all(followed)
    assert followed.line[0].tolist() == list(range(1, 21))
    assert [line["iteration"] for line in followed.latest] == list(range(1, 21))


def test_wrong_lines_are_left_out_and_named(run: RunDir) -> None:
    good = text_of(1, 1)
    add(run, good + '{"iteration": "x"}\n\n' + '{"iteration": 2, "loss": NaN}\n' + text_of(3, 3))
    followed = FollowedMetrics(run)
    read_all(followed)
    assert followed.line[0].tolist() == [1, 3]
    assert followed.curve.num_nonfinite == 1
    assert followed.damage == [
        f"{run.metrics}, the line at byte {len(good)}: iteration must be a whole number "
        "from 0, got 'x'"
    ]


def test_a_file_that_is_no_file_is_named(run: RunDir) -> None:
    run.metrics.mkdir()
    followed = FollowedMetrics(run)
    assert followed.read() is True
    assert followed.is_whole
    assert followed.damage == [f"{run.metrics} must be a file, and is a folder"]
    assert followed.read() is False


def test_a_run_without_metrics_has_no_line(run: RunDir) -> None:
    followed = FollowedMetrics(run)
    read_all(followed)
    assert (len(followed.line[0]), followed.lines, followed.damage) == (0, [], [])


def test_the_first_finite_loss_is_kept_beside_the_latest_lines(run: RunDir) -> None:
    lines = [{"iteration": i, "loss": 4.0 if i == 2 else None} for i in range(1, 300)]
    add(run, "".join(json.dumps(line) + "\n" for line in lines))
    followed = FollowedMetrics(run)
    read_all(followed)
    assert followed.lines[0] == {"iteration": 2, "loss": 4.0}
    assert len(followed.lines) == 101
    assert loss_curve(followed.lines).iterations == (2,)


def test_a_large_file_is_sketched_until_it_is_read(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SKETCHED_BYTES", 10_000)
    monkeypatch.setattr(room, "_SKETCH_PIECE", 400)
    add(run, text_of(1, 20_000))
    followed = FollowedMetrics(run)
    followed.read(1000)
    assert followed.sketch is not None
    assert not followed.is_whole
    x, y = followed.line
    assert 300 < len(x) <= room.SKETCH_LINES
    assert x[0] < 10
    assert x[-1] > 19_990
    assert y == pytest.approx(5 - x / 100)
    assert max(x[1:] - x[:-1]) < 200, "the lines are at even distances"
    read_all(followed)
    assert followed.sketch is None
    assert len(followed.line[0]) == 20_000


def test_losses_that_are_not_finite_are_none_in_lines(run: RunDir) -> None:
    add(run, '{"iteration": 1, "loss": null}\n{"iteration": 2, "loss": 3}\n')
    followed = FollowedMetrics(run)
    read_all(followed)
    assert followed.latest[0]["loss"] is None
    assert followed.line[1].tolist() == [3.0]
    assert not math.isnan(followed.line[1][0])


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

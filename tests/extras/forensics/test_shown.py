"""The dossiers on the page: what moved, the data, and series that can be drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quantexp.analysis.report.write import write_report
from quantexp.extras.forensics.shown import HEIGHT, WIDTH, shown_dossiers, sparkline
from quantexp.runs.dossiers import Dossier, Trigger, folder_of, write_dossier
from quantexp.runs.paths import RunDir
from tests.analysis.compare.runs import Runs
from tests.analysis.report.test_write import Page


@pytest.fixture
def run(runs: Runs) -> RunDir:
    """A run whose L3-fc1 input grew from iteration 15 on, with the dossier of iteration 16."""
    run = runs.add("FA_linear_mxfp8", [4.0] * 15 + [9.0, None, 4.0])
    folder = folder_of(run, 16)
    folder.mkdir(parents=True)
    with (folder / "statistics.jsonl").open("w") as stream:
        for iteration in range(1, 18):
            for tensor in ("input", "weight"):
                grown = 2.0 ** max(0, iteration - 13) if tensor == "input" else 1.0
                line = {
                    "iteration": iteration,
                    "layer": 3,
                    "module": "fc1",
                    "operation": "forward",
                    "tensor": tensor,
                    "statistics": {"abs_max": grown, "std": 1.0, "nonfinite": 0},
                }
                stream.write(json.dumps(line) + "\n")
    tokens = {
        "iteration": 16,
        "micro_batch": 0,
        "data_rank": 0,
        "samples": [30],
        "tokens": [[1, 2, 1]],
        "texts": {"1": "<b>a", "2": " spike "},
    }
    (folder / "tokens.jsonl").write_text(json.dumps(tokens) + "\n")
    words = "loss 9 lies 80.0 robust deviations above its median 4"
    time = "2026-11-27T01:00:00.000+00:00"
    write_dossier(run, Dossier(16, time, Trigger.LOSS, words, [1, 16], 10, 17, 56, 2_000_000))
    return run


def test_page_says_what_moved_first_and_shows_the_data(run: RunDir) -> None:
    text = " ".join(Page(write_report([run.root], run.root)).text.split())
    for words in (
        "Iteration 16: loss 9 lies 80.0 robust deviations above its median 4",
        "after iteration 16, 2026-11-27 01:00:00 UTC",
        "all sites, iterations 1 to 16",
        "56 tensors of iteration 17, 2.0 MB",
        "nearest checkpointiteration 10, ",
        "What moved first",
        "L3-fc1 inputlog2 amax 14 03 ",
        "sample 30<b>a spike <b>a",
    ):
        assert words in text
    assert "weight" not in text.partition("What moved first")[2].partition("Its data")[0]


def test_series_are_of_the_ring_s_iterations(run: RunDir) -> None:
    (shown,) = shown_dossiers(run)
    assert [(row.statistic, row.before, row.last) for row in shown.metrics] == [("loss", "4", "9")]
    (moved,) = shown.moved
    assert moved.line.left_x is not None
    assert 0 < moved.line.left_x < WIDTH


def test_newest_dossier_comes_first_and_an_incomplete_one_is_left_out(run: RunDir) -> None:
    time = "2026-11-27T01:00:00.000+00:00"
    folder_of(run, 20).mkdir()
    write_dossier(run, Dossier(20, time, Trigger.REQUEST, "requested from outside"))
    folder_of(run, 21).mkdir()
    (folder_of(run, 21) / "dossier.json").write_text('{"iteration": 21')
    folder_of(run, 22).mkdir()
    shown = shown_dossiers(run)
    assert [one.dossier.iteration for one in shown] == [20, 16]
    assert dict(shown[0].facts)["statistics"] == "none (capture.ring holds them)"
    assert dict(shown[0].facts)["values"] == "none"
    assert dict(shown[0].facts)["nearest checkpoint"].startswith("none with a training state")
    assert shown[0].moved == []


def test_run_without_dossiers_has_no_part_of_them(runs: Runs) -> None:
    run = runs.add("bf16")
    assert "Dossiers" not in Page(write_report([run.root], run.root)).text


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 4.0],
        [3.0, 3.0, 3.0],
        [math.nan, 1.0, math.inf, 2.0],
        [math.nan] * 3,
        [1e-300, 1e300],
    ],
)
@pytest.mark.parametrize("band", [None, (0.0, 0.5), (3.0, 3.0)])
def test_every_series_can_be_drawn_inside_its_box(
    values: list[float], band: tuple[float, float] | None
) -> None:
    line = sparkline(values, band)
    numbers = [float(n) for n in line.points.replace("M", "").replace("L", "").split()]
    assert all(0 <= x <= WIDTH for x in numbers[::2])
    assert all(0 <= y <= HEIGHT for y in numbers[1::2])
    assert len(numbers) == 2 * sum(map(math.isfinite, values))
    breaks = sum(
        math.isfinite(value) and (index == 0 or not math.isfinite(values[index - 1]))
        for index, value in enumerate(values)
    )
    assert line.points.count("M") == breaks
    if band is not None:
        assert line.band is not None
        assert 0 <= line.band[0] <= HEIGHT
        assert 0 <= line.band[1] <= HEIGHT


def test_unreadable_metrics_leave_the_dossier(run: RunDir, tmp_path: Path) -> None:
    run.metrics.write_text("not JSON\n")
    (shown,) = shown_dossiers(run)
    assert shown.metrics == []
    assert shown.moved

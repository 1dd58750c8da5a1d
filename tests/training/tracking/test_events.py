"""The values and names that every tracker receives of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from quantexp.capture.statistics.counts import Counts
from quantexp.runs.curves import CurvesLine
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training.tracking.events import (
    MAX_POINTS,
    PointReader,
    TrackedRun,
    hyperparameters,
    point,
)

from .conftest import curves_line, line

Make = Callable[..., TrackedRun]


def test_point_has_the_keys_of_metrics_in_two_groups() -> None:
    entry = point(line(3))
    assert entry.iteration == 3
    assert entry.time_s == 1767323103.5  # date -d 2026-01-02T03:05:03.5Z +%s.%N
    assert entry.scalars == {
        "train/loss": 2.0,
        "train/grad_norm": 1.5,
        "train/lr": 1e-4,
        "train/tokens_seen": 384.0,
        "perf/step_time_s": 0.5,
        "perf/tokens_per_s": 256.0,
        "perf/tflops": 0.25,
        "perf/memory_gb": 2.0,
    }


def test_null_of_a_loss_or_gradient_is_nan_and_other_nulls_are_no_curve() -> None:
    entry = point(line(1, loss=None, grad_norm=None))
    assert math.isnan(entry.scalars["train/loss"])
    assert math.isnan(entry.scalars["train/grad_norm"])
    assert "train/loss_scale" not in entry.scalars


def test_inf_stays() -> None:
    assert point(line(1, grad_norm=math.inf)).scalars["train/grad_norm"] == math.inf


def test_steps_left_out_are_a_curve_where_losses_are_scaled() -> None:
    assert "train/skipped" not in point(line(1)).scalars
    scaled = point(line(1, skipped=True, loss_scale=256.0)).scalars
    assert (scaled["train/skipped"], scaled["train/loss_scale"]) == (1.0, 256.0)


def test_new_number_of_metrics_is_a_curve_too() -> None:
    assert point(line(1, valid_loss=4.5, note="text")).scalars["train/valid_loss"] == 4.5


@pytest.mark.parametrize("missing", ["iteration", "tokens", "time"])
def test_line_without_its_axes_is_no_point(missing: str) -> None:
    values = line(1)
    values.pop(missing)
    with pytest.raises(KeyError):
        point(values)


def test_name_is_the_folder_and_the_attempt(tracked: Make) -> None:
    run = tracked()
    assert run.name == "tiny_data_bf16-0a1b2c3d.1"
    (run.folder.attempts / "1").mkdir(parents=True)
    assert tracked().name == "tiny_data_bf16-0a1b2c3d.2"


def test_id_stays_with_the_attempt_and_differs_from_every_other(tracked: Make) -> None:
    run = tracked()
    assert run.id == tracked().id
    assert len(run.id) == 16
    others = [
        replace(run, attempt=2),
        replace(run, created="2026-01-02T03:04:06+00:00"),
        replace(run, folder=RunDir(Path("/elsewhere/other"))),
    ]
    assert len({run.id, *(other.id for other in others)}) == 4


def test_hyperparameters_are_flat_and_contain_no_paths(tiny: Callable[..., Experiment]) -> None:
    values = hyperparameters(
        tiny(
            "quant=linear_mxfp8", "quant.rules=[{layers:[0],format:bf16}]", "dataset.split='90,10'"
        )
    )
    assert values["model.num_layers"] == 2
    assert values["training.lr_schedule"] == "cosine"
    assert values["quant.name"]
    assert values["quant.linear.format"] == "mxfp8_e4m3"
    assert '"layers": [0]' in str(values["quant.rules"])
    assert values["dataset.label"] == "wikipedia (built-in sample)"
    assert values["dataset.split"] == "90,10"
    assert values["launcher.num_processes"] == 1
    assert all(isinstance(value, str | int | float | bool) for value in values.values())
    assert not [key for key in values if key.startswith(("paths", "tracking")) or "path" in key]


def test_statistics_of_the_same_iteration_join_a_point() -> None:
    entry = point(line(2), cast(CurvesLine, curves_line(2)))
    assert entry.scalars["amax/L0-fc1/input"] == 2.5
    assert entry.scalars["train/loss"] == 3.0
    assert entry.histograms == {"log2_magnitude/L0/key": Counts(-3, (2, 0, 7))}
    assert point(line(2)).histograms == {}


def metrics(*iterations: int) -> str:
    return "".join(json.dumps(line(i)) + "\n" for i in iterations)


def read(reader: PointReader) -> list[int]:
    return [each.iteration for each in reader.read()]


def test_points_that_are_read_have_their_statistics(tmp_path: Path) -> None:
    """The file of the statistics is created by the first captured iteration."""
    run = RunDir(tmp_path)
    with closing(PointReader(run)) as reader:
        run.metrics.write_text(metrics(1))
        points = reader.read()
        run.curves.write_text("".join(json.dumps(curves_line(i)) + "\n" for i in (2, 4)))
        run.metrics.write_text(metrics(1, 2, 3, 4))
        points += reader.read()
    assert [each.scalars.get("amax/L0-fc1/input") for each in points] == [None, 2.5, None, 4.5]


def test_points_are_read_while_the_file_grows(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reader = PointReader(run)
    assert read(reader) == []
    run.metrics.write_text(metrics(1, 2))
    assert (read(reader), read(reader)) == ([1, 2], [])
    run.metrics.write_text(metrics(1, 2, 3)[:-20])
    assert read(reader) == [], "an incomplete line"
    run.metrics.write_text(metrics(1, 2, 3))
    assert read(reader) == [3]


def test_lines_of_another_version_are_skipped_however_many_they_are(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    other = '{"iteration": 1}\n{torn\n[]\n' * MAX_POINTS
    run.metrics.write_text(other + metrics(4))
    assert read(PointReader(run)) == [4]


def test_long_file_is_read_in_parts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(metrics(*([1] * MAX_POINTS), 2))
    reader = PointReader(run)
    assert len(reader.read()) == MAX_POINTS
    assert read(reader) == [2]

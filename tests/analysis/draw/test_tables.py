from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch

from quantexp.analysis.draw.captured import draw_captured
from quantexp.analysis.draw.tables import Row, write_tables
from quantexp.analysis.measures.row import Wanted, read_row
from quantexp.capture.statistics.histogram import QUANTILES

from .conftest import normal, stored


def rows(folder: Path) -> list[Row]:
    """An ordinary tensor, an empty one, and one with NaN."""
    x = normal(8, 8)
    x[0, 0] = math.nan
    tensors = {"input": normal(32, 8), "output": torch.empty(0, 4), "grad_input": x}
    table = []
    for place, (name, tensor) in enumerate(tensors.items()):
        about = {"tensor": name, "layer": place, "module": "fc1", "iteration": 5, "bytes": 1000}
        entry = stored(folder, tensor, **about)
        table.append(Row("my_run", entry, read_row(entry, Wanted(record=True))[0]))
    return table


def test_the_csv_and_the_json_hold_the_same_numbers_as_the_tensors(tmp_path: Path) -> None:
    tensors = rows(tmp_path)
    write_tables(tmp_path / "out", tensors, {}, details=True)
    table = pd.read_csv(tmp_path / "out/statistics/statistics.csv")
    listed = json.loads((tmp_path / "out/statistics/statistics.json").read_text())
    x = tensors[0].entry.torch().double().numpy()
    assert list(table["tensor"]) == [one["tensor"] for one in listed]
    assert table["mean"][0] == listed[0]["mean"] == tensors[0].record["mean"]
    assert abs(table["mean"][0] - x.mean()) < 1e-15
    assert table["q0.5"][0] == listed[0]["quantiles"]["0.5"]
    assert {f"q{share}" for share in QUANTILES} <= set(table.columns)
    assert table["shape"][1] == "0x4"
    assert math.isnan(table["mean"][1])
    assert listed[1]["mean"] is None
    assert list(table["finding"])[1:] == ["empty", "1 NaN"]


def test_the_table_names_odd_tensors_and_unusable_files(tmp_path: Path) -> None:
    write_tables(tmp_path, rows(tmp_path), {"a/b.pt": "torn"}, details=False)
    text = (tmp_path / "tensor_stats.txt").read_text()
    assert text.startswith("3 tensors, 3.0 kB\n  my_run: 3\nby quantisation type: ")
    assert "empty tensors: 1\n  L1 fc1 output i5: empty\n" in text
    assert "tensors with NaN or Inf: 1\n  L2 fc1 grad_input i5: 1 NaN\n" in text
    assert "files that could not be used: 1\n  a/b.pt\n" in text
    (line,) = (line for line in text.splitlines() if line.startswith("L0 fc1 input i5"))
    assert line.split()[4:6] == ["bfloat16", "32x8"]
    assert not (tmp_path / "statistics").exists()


def test_several_sources_are_named_in_their_rows_and_the_text_has_every_quantile(
    tmp_path: Path,
) -> None:
    first, *_ = rows(tmp_path)
    other = Row("other_run", first.entry, first.measures)
    write_tables(tmp_path, [first, other], {}, details=True)
    assert "\nother_run  L0 fc1 input i5" in (tmp_path / "tensor_stats.txt").read_text()
    text = (tmp_path / "statistics/statistics.txt").read_text()
    assert all(f"{share:7.2%}:" in text for share in QUANTILES)


def test_no_tensor_is_an_empty_list(tmp_path: Path) -> None:
    write_tables(tmp_path, [], {}, details=True)
    assert json.loads((tmp_path / "statistics/statistics.json").read_text()) == []


def test_the_table_summarises_the_capture_by_type_layer_type_operation_and_module(
    tmp_path: Path,
) -> None:
    tensors = []
    for expert, (layer_type, quant_type, operation) in enumerate(
        [
            ("linear", "mxfp8", "forward"),
            ("linear", "mxfp8", "backward"),
            ("attention", "bf16", "forward"),
        ]
    ):
        entry = stored(
            tmp_path,
            normal(4, 4),
            tensor="input",
            layer=expert,
            layer_type=layer_type,
            quant_type=quant_type,
            operation=operation,
            module="attention" if layer_type == "attention" else f"expert{expert}-fc1",
            bytes=1000 * (expert + 1),
        )
        tensors.append(Row("my_run", entry, read_row(entry, Wanted(record=True))[0]))
    write_tables(tmp_path, tensors, {}, details=False)
    text = (tmp_path / "tensor_stats.txt").read_text()
    half = "50.0% of the bytes"
    assert f"by quantisation type: bf16 1 tensors, {half}; mxfp8 2 tensors, {half}\n" in text
    assert f"by layer type: attention 1 tensors, {half}; linear 2 tensors, {half}\n" in text
    assert "by operation: backward 1 tensors, 33.3% of the bytes; forward 2 tensors, 66.7%" in text
    assert f"by module: attention 1 tensors, {half}; expert-fc1 2 tensors, {half}\n" in text
    page = draw_captured(tensors)
    widths = [[bar.get_width() for bar in ax.patches] for ax in page.figure.axes]  # type: ignore[attr-defined]
    assert widths == [
        pytest.approx([0.5, 0.5]),
        pytest.approx([0.5, 0.5]),
        pytest.approx([1 / 3, 2 / 3]),
        pytest.approx([0.5, 0.5]),
    ]


def test_tensors_with_statistics_alone_are_counted(tmp_path: Path) -> None:
    tensors = rows(tmp_path)
    bare = [
        replace(row, entry=replace(row.entry, metadata={**row.entry.metadata, "bytes": 0}))
        for row in tensors
    ]
    page = draw_captured(bare)
    assert page.figure.axes[0].get_title(loc="left").endswith("share of tensors")
    write_tables(tmp_path, bare, {}, details=False)
    assert "by operation: unknown 3 tensors\n" in (tmp_path / "tensor_stats.txt").read_text()

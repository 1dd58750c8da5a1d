"""Everything that analyses captures gives the same for a capture in parts as for the whole one that was divided."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.analysis.measures.measured import Measured, Request, measure
from quantexp.analysis.measures.table import MeasuresTable, key_of
from quantexp.analysis.numerics.attention import layers_of, maps_of
from quantexp.analysis.numerics.comparison_chapter import drift_from
from quantexp.analysis.quick.first_look import captured_in, first_look
from quantexp.capture.check.folder import check
from quantexp.capture.reader import open_capture
from quantexp.cli.main import main
from quantexp.model.layout import Layout
from tests.analysis.captures import MX4, Capture
from tests.analysis.numerics.desks import add_run
from tests.capture.layouts import divide

LAYOUT = Layout(tensor=2, sequence=True, context=2)


@pytest.fixture
def whole(capture: Capture) -> Path:
    add_run(capture, 1, MX4)
    for line in capture.lines:
        line["hash"] = None
    capture.write()
    return capture.dir


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> Path:
    """The same capture as four ranks store it, in a run folder of its own."""
    folder = tmp_path / "run" / "tensors"
    divide(whole, folder, LAYOUT, num_query_groups=2)
    # The input is alike on the ranks of tensor parallelism, the weight on those of context parallelism.
    assert len(list(folder.rglob("*.pt"))) == 2 + 2 + 7 * 4
    return folder


def measures(folder: Path) -> dict[str, Measured]:
    entries = open_capture(folder)
    return {entry.label: measure(entry, Request(("mxfp8", "hifp8"))) for entry in entries}


def test_measures_are_the_same(whole: Path, parts: Path) -> None:
    """Statistics of parts are combined in float64; those of the whole tensor are computed when they are missing."""
    expected, divided = measures(whole), measures(parts)
    assert expected.keys() == divided.keys()
    for label, one in expected.items():
        other = divided[label]
        assert (other.place, other.shape, other.notes) == (one.place, one.shape, one.notes)
        assert other.operands == one.operands
        assert (other.channels, other.heads) == (one.channels, one.heads)
        assert (other.count, other.abs_max) == (one.count, one.abs_max)
        assert other.log2_magnitude == one.log2_magnitude
        # Relative to the largest element, 64 bits of rounding leave 1e-15 for each sum of some hundred terms.
        assert other.std == pytest.approx(one.std, rel=1e-12)


def scores(folder: Path, out: Path) -> list[dict[str, Any]]:
    assert main(["requantise", str(folder), "--out", str(out), "--formats", "mxfp4,hifp8"]) == 0
    with (out / "requantise.csv").open(newline="") as stream:
        rows = [{k: v for k, v in row.items() if k != "file"} for row in csv.DictReader(stream)]
    return sorted(rows, key=str)


def test_requantise_scores_the_same(whole: Path, parts: Path, tmp_path: Path) -> None:
    expected = scores(whole, tmp_path / "one")
    assert expected
    assert scores(parts, tmp_path / "four") == expected
    assert "is none of the captured tensors" not in (tmp_path / "four/requantise.json").read_text()


def test_nothing_has_drifted_from_the_whole_capture(whole: Path, parts: Path) -> None:
    assert {drift_from(entry, str(whole)) for entry in open_capture(parts)} == {0.0}


def test_attention_maps_are_the_same(whole: Path, parts: Path) -> None:
    (one,), (other,) = (layers_of(open_capture(folder)) for folder in (whole, parts))
    assert torch.equal(maps_of(one).probabilities, maps_of(other).probabilities)


def test_draw_report_and_list_read_every_tensor(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not check(parts).problems
    out = tmp_path / "draw"
    assert main(["draw", str(parts), f"out={out}", "--only=distributions"]) == 0
    assert main(["captures", str(parts), "--list"]) == 0
    assert main(["captures", str(parts), "--export", str(tmp_path / "out"), "--to", "npz"]) == 0
    assert "9 files in" in capsys.readouterr().out


def test_a_tensor_is_drawn_again_if_any_part_has_changed(parts: Path) -> None:
    weight = open_capture(parts).select(tensor="weight")[0]
    before = key_of(weight)
    assert key_of(open_capture(parts).select(tensor="weight")[0]) == before
    os.utime(weight.parts[1].path, (1, 1))
    assert key_of(weight) != before


def test_a_changed_part_is_looked_at_again_and_a_missing_one_is_a_finding(
    parts: Path, tmp_path: Path
) -> None:
    table = MeasuresTable(tmp_path / "figures")
    assert "incomplete" not in first_look(captured_in(parts), table).findings
    weight = open_capture(parts).select(tensor="weight")[0]
    weight.parts[1].path.unlink()
    findings = first_look(captured_in(parts), table).findings
    assert [key for key in findings if key in ("missing", "corrupt")]

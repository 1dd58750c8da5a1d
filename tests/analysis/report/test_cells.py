from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from analysis.captures import MX8, Capture, linear_formats
from analysis.compare.runs import Runs
from quantexp.analysis.report.cells import numerics
from quantexp.analysis.report.deadline import Deadline
from quantexp.analysis.statistics import quantisation_error
from quantexp.paths import RunDir

from .captured import TENSORS, captured, line, write


def test_statistics_are_shown_without_opening_a_tensor(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = captured(run)
    found = numerics(run, None, 1000, Deadline(None))
    assert found.layers == [0, 1]
    assert found.rows == [TENSORS[i] for i in (0, 1, 2, 4, 3)], "as data flows, forward first"
    assert len(found.cells) == 10
    of_first = lines[0]["statistics"]
    content = found.cells[0][3]
    assert content["abs_max"] == of_first["abs_max"]
    assert content["sqnr_db"] == pytest.approx(of_first["fidelity"]["sqnr_db"], rel=1e-5)
    assert content["bins"][1] == of_first["log2_magnitude"]["counts"]
    assert content["operands"][0][0] == "capture.format mxfp8_e4m3"
    assert content["sampled"] == 0
    assert found.notes == []


def test_without_a_capture_there_is_nothing_and_no_error(runs: Runs) -> None:
    assert numerics(runs.add(), None, 1000, Deadline(None)).cells == []


def test_an_empty_capture_is_told(runs: Runs) -> None:
    run = runs.add()
    write(run, [])
    (note,) = numerics(run, None, 1000, Deadline(None)).notes
    assert "holds no captured tensors" in note


def test_only_the_first_micro_batch_of_the_first_rank_is_shown_and_that_is_said(runs: Runs) -> None:
    run = runs.add()
    statistics = [{"count": 1, "abs_max": float(value)} for value in range(3)]
    places = [(1, 0), (0, 1), (0, 0)]
    write(
        run,
        [
            line("forward", "qkv", "input", 0, rank=rank, micro_batch=micro, statistics=one)
            for (rank, micro), one in zip(places, statistics, strict=True)
        ],
    )
    found = numerics(run, None, 1000, Deadline(None))
    assert [cell[3]["abs_max"] for cell in found.cells] == [2.0]
    assert found.notes[0].startswith("2 tensors of other micro-batches and ranks are not shown")


def test_too_many_iterations_are_thinned_to_first_last_and_between(runs: Runs) -> None:
    run = runs.add()
    captured(run, iterations=tuple(range(1, 11)), fmt=None)
    found = numerics(run, None, 30, Deadline(None))
    assert found.iterations == [1, 5, 10]
    assert len(found.cells) == 30
    assert found.notes == ["3 of 10 iterations are shown, to keep the page small"]


def test_of_a_long_capture_only_what_is_shown_is_read(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.add()
    write(
        run, [line("forward", "qkv", "input", layer, i) for i in range(1, 501) for layer in (0, 1)]
    )
    read = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(1) or loads(text))
    found = numerics(run, None, 8, Deadline(None))
    assert found.iterations == [1, 167, 334, 500]
    assert len(read) == len(found.cells) == 8


def test_a_manifest_that_takes_too_long_is_shown_as_far_as_it_was_read(runs: Runs) -> None:
    run = runs.add()
    write(run, [line("forward", "qkv", "input", 0, i) for i in range(1, 3001)])
    found = numerics(run, None, 2, Deadline(-1.0))
    assert found.iterations == [1, 1999]
    assert found.notes[0].startswith("read up to iteration 1999: quantexp report llama32-1b")


def test_lines_of_ranks_that_are_not_joined_yet_and_torn_ones(runs: Runs) -> None:
    run = runs.add()
    write(run, [line("forward", "qkv", "input", 0)])
    other = json.dumps(line("forward", "qkv", "input", 1, rank=1)) + "\n"
    (run.tensors / "manifest.rank1.jsonl").write_text(other + other[:300])
    assert numerics(run, None, 100, Deadline(None)).layers == [0, 1]


def test_too_many_layers_and_rows_are_thinned_too(runs: Runs) -> None:
    run = runs.add()
    captured(run, layers=12, fmt=None)
    found = numerics(run, None, 20, Deadline(None))
    assert (found.layers, len(found.cells)) == ([0, 4, 7, 11], 20)
    few = numerics(run, None, 4, Deadline(None))
    assert (len(few.rows), len(few.layers), len(few.cells)) == (2, 2, 4)
    assert "2 of 5 tensors of a layer are shown, to keep the page small" in few.notes


def test_values_without_a_judged_format_are_judged_as_declared(capture: Capture) -> None:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    capture.add(x, "input", formats=linear_formats(MX8))
    found = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    content = found.cells[0][3]
    expected = quantisation_error(x, "mxfp8_e4m3", -1, {"scale_rule": "rceil"}).sqnr_db
    by_slot = {row[0]: row[1] for row in content["operands"]}
    assert by_slot["x fprop mxfp8_e4m3"] == pytest.approx(expected, rel=1e-4)
    assert content["sqnr_db"] == min(by_slot.values())
    assert content["abs_max"] == pytest.approx(float(x.abs().max()), rel=1e-5), "six digits"
    assert content["sampled"] == x.numel(), "the manifest has no statistics of it"


def test_after_the_deadline_no_values_are_looked_at_and_that_is_said(capture: Capture) -> None:
    capture.add(torch.ones(4, 1, 32), "input", formats=linear_formats(MX8))
    found = numerics(RunDir(capture.run_dir), None, 100, Deadline(-1.0))
    assert found.cells[0][3]["operands"] == []
    (note,) = found.notes
    assert note.startswith("of 1 tensors SQNR, underflow and saturation are left out: quantexp")


def test_values_that_are_gone_leave_an_empty_cell(capture: Capture) -> None:
    line_ = capture.add(torch.ones(4, 1, 32), "input", formats=linear_formats(MX8))
    (capture.dir / line_["file"]).unlink()
    content = numerics(RunDir(capture.run_dir), None, 100, Deadline(None)).cells[0][3]
    assert "abs_max" not in content
    assert content["operands"] == []


def test_an_old_collection_without_a_manifest_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run-1" / "tensors" / "mxfp8"
    folder.mkdir(parents=True)
    name = "20250908_095220_0001_attention_L3_forward_pre_FA_mxfp8_query.pt"
    torch.save({"tensor": torch.full((4, 32), 2.0), "metadata": {}}, folder / name)
    found = numerics(RunDir(tmp_path / "run-1"), None, 100, Deadline(None))
    assert found.layers == [3]
    assert found.cells[0][3]["abs_max"] == 2.0

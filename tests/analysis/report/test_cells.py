from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quantexp.analysis.draw.arguments import Request
from quantexp.analysis.draw.verb import draw
from quantexp.analysis.measures.table import MeasuresTable
from quantexp.analysis.quick.first_look import captured_in, first_look
from quantexp.analysis.report.cells import Numerics, Row, numerics
from quantexp.analysis.report.judged import Deadline
from quantexp.capture.statistics.errors import quantisation_error
from quantexp.formats import resolve
from quantexp.reading import json_files
from quantexp.runs.paths import RunDir
from tests.analysis.captures import BF16, MX8, Capture, attention_formats, linear_formats
from tests.analysis.compare.runs import Runs

from .captured import TENSORS, captured, line, write


def tensors_of(table: Numerics) -> list[Row]:
    return [row for row in table.rows if not row.is_slot]


def content_of(table: Numerics, name: str, layer: int = 0, *, module: str = "") -> dict[str, Any]:
    """The content of the first row of that name in the last iteration."""
    row = next(i for i, r in enumerate(table.rows) if r.name == name and module in ("", r.module))
    place = [len(table.iterations) - 1, row, table.layers.index(layer)]
    content: dict[str, Any] = next(cell[3] for cell in table.cells if cell[:3] == place)
    return content


def test_statistics_are_shown_without_opening_a_tensor(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = captured(run)
    table = numerics(run, None, 1000, Deadline(None))
    assert table.layers == [0, 1]
    in_flow = [TENSORS[i] for i in (0, 1, 2, 4, 3)]
    assert tensors_of(table) == [Row(*names) for names in in_flow], "as data flows, forward first"
    of_first = lines[0]["statistics"]
    content = table.cells[0][3]
    assert content["abs_max"] == of_first["abs_max"]
    assert content["crest"] == pytest.approx(
        of_first["abs_max"] / math.hypot(of_first["mean"], of_first["std"]), rel=1e-5
    )
    assert content["bins"][1] == of_first["log2_magnitude"]["counts"]
    assert "state" not in content
    judged = content_of(table, "input", module="qkv") | table.cells[10][3]
    assert judged["format"] == "mxfp8_e4m3 rceil (capture.format)"
    assert judged["sqnr_db"] == pytest.approx(of_first["fidelity"]["sqnr_db"], rel=1e-5)
    assert len(table.cells) == 20, "of each tensor what it is, and how capture.format judged it"


def test_a_run_without_a_capture_has_no_cells_and_no_error(runs: Runs) -> None:
    assert numerics(runs.add(), None, 1000, Deadline(None)).cells == []


def test_an_empty_capture_has_a_note(runs: Runs) -> None:
    run = runs.add()
    write(run, [])
    (note,) = numerics(run, None, 1000, Deadline(None)).notes
    assert "holds no captured tensors" in note


def test_only_the_first_micro_batch_of_the_first_rank_is_shown_with_a_note(runs: Runs) -> None:
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
    table = numerics(run, None, 1000, Deadline(None))
    assert [cell[3]["abs_max"] for cell in table.cells] == [2.0]
    assert table.notes[0].startswith("2 tensors of other micro-batches and ranks are not shown")


def test_too_many_iterations_are_thinned_to_first_last_and_between(runs: Runs) -> None:
    run = runs.add()
    captured(run, iterations=tuple(range(1, 11)), fmt=None)
    table = numerics(run, None, 30, Deadline(None))
    assert table.iterations == [1, 5, 10]
    assert len(table.cells) == 30
    assert table.notes == ["3 of 10 iterations are shown, to keep the page small"]


def test_only_the_shown_lines_of_a_long_capture_are_read(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.add()
    write(
        run, [line("forward", "qkv", "input", layer, i) for i in range(1, 501) for layer in (0, 1)]
    )
    calls = []
    value_of = json_files.value_of
    monkeypatch.setattr(json_files, "value_of", lambda *line: calls.append(1) or value_of(*line))
    table = numerics(run, None, 8, Deadline(None))
    assert table.iterations == [1, 167, 334, 500]
    assert len(calls) == len(table.cells) == 8


def test_a_manifest_that_takes_too_long_is_shown_up_to_the_last_line_read(runs: Runs) -> None:
    run = runs.add()
    write(run, [line("forward", "qkv", "input", 0, i) for i in range(1, 3001)])
    table = numerics(run, None, 2, Deadline(-1.0))
    assert table.iterations == [1, 1999]
    assert table.notes[0].startswith("read up to iteration 1999: quantexp report llama32-1b")


def test_lines_of_unjoined_ranks_are_read_and_torn_ones_skipped(runs: Runs) -> None:
    run = runs.add()
    write(run, [line("forward", "qkv", "input", 0)])
    other = json.dumps(line("forward", "qkv", "input", 1, rank=1)) + "\n"
    (run.tensors / "manifest.rank1.jsonl").write_text(other + other[:300])
    assert numerics(run, None, 100, Deadline(None)).layers == [0, 1]


def test_too_many_layers_and_rows_are_thinned_too(runs: Runs) -> None:
    run = runs.add()
    captured(run, layers=12, fmt=None)
    table = numerics(run, None, 20, Deadline(None))
    assert (table.layers, len(table.cells)) == ([0, 4, 7, 11], 20)
    few = numerics(run, None, 4, Deadline(None))
    assert (len(few.rows), len(few.layers), len(few.cells)) == (2, 2, 4)
    assert "2 of 5 tensors of a layer are shown, to keep the page small" in few.notes


def test_values_are_judged_slot_by_slot_as_declared(capture: Capture) -> None:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    capture.add(x, "input", formats=linear_formats(MX8))
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    assert table.rows == [
        Row("forward", "fc1", "input"),
        Row("forward", "fc1", "x fprop", is_slot=True),
        Row("backward", "fc1", "x wgrad", is_slot=True),
    ]
    for name, axis in (("x fprop", -1), ("x wgrad", 0)):
        content = content_of(table, name)
        expected = quantisation_error(x, resolve("mxfp8_e4m3", scale_rule="rceil"), axis).sqnr_db
        assert content["sqnr_db"] == pytest.approx(expected, rel=1e-4)
        assert (content["state"], content["format"]) == ("judged", "mxfp8_e4m3 rceil")
        assert content["of"] == 0, "the row of its tensor"
    assert content_of(table, "input")["abs_max"] == pytest.approx(float(x.abs().max()), rel=1e-5)


def test_unquantised_and_unjudged_slots_have_different_states(capture: Capture) -> None:
    formats = {**linear_formats(MX8), "wgrad.x": {**BF16, "axis": "tokens"}}
    capture.add(torch.ones(32, 1, 32), "input", formats=formats)
    capture.add(torch.ones(4, 1, 1, 32), "key", "attention", formats=attention_formats(MX8))
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(-1.0))
    states = {row.name: content_of(table, row.name)["state"] for row in table.rows if row.is_slot}
    assert states == {
        "x fprop": "late",
        "x wgrad": "unquantised",
        "k fprop": "late",
        "k dgrad_q": "reused",
    }
    (note,) = table.notes
    assert note.startswith("2 tensors were not judged for want of time: quantexp report")


def test_measures_of_the_picture_are_taken_without_reading_values(capture: Capture) -> None:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    capture.add(x, "input", formats=linear_formats(MX8))
    run = RunDir(capture.run_dir)
    looked = numerics(run, None, 100, Deadline(None))
    first_look(captured_in(capture.dir), MeasuresTable(run.figures))
    table = numerics(run, None, 100, Deadline(-1.0))
    assert table.notes == []
    assert content_of(table, "x wgrad") == content_of(looked, "x wgrad")


def test_the_assumed_format_of_a_filtered_picture_is_not_reused(capture: Capture) -> None:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    capture.add(x, "input", "fc1", quant_type="bf16", formats=linear_formats(BF16))
    capture.add(x, "input", "fc2", formats=linear_formats(MX8))
    run = RunDir(capture.run_dir)
    request = Request([str(run.root)], {"type": "bf16"}, run.figures, ("png",), ("quick_analysis",))
    draw(request, Console(quiet=True), print)
    assert {path.name for path in run.figures.iterdir()} == {
        "quick_analysis.filtered.png",
        "measures.jsonl",
    }
    table = numerics(run, None, 100, Deadline(None))
    assert content_of(table, "x fprop", module="fc1")["state"] == "unquantised"


def test_missing_values_leave_cells_with_the_state_failed(capture: Capture) -> None:
    line_ = capture.add(torch.ones(4, 1, 32), "input", formats=linear_formats(MX8))
    (capture.dir / line_["file"]).unlink()
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    assert "abs_max" not in content_of(table, "input")
    assert content_of(table, "input")["state"] == "failed"
    assert content_of(table, "x fprop")["state"] == "failed"


@pytest.mark.parametrize(
    ("x", "state"), [(torch.ones(32, 1, 32), "exact"), (torch.zeros(32, 1, 32), "empty")]
)
def test_an_sqnr_without_a_number_has_a_state(
    capture: Capture, x: torch.Tensor, state: str
) -> None:
    capture.add(x, "input", formats=linear_formats(MX8))
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    content = content_of(table, "x fprop")
    assert content["state"] == state
    assert "sqnr_db" not in content


def test_operands_of_a_run_that_quantises_nothing_are_judged_in_mxfp8(capture: Capture) -> None:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    capture.add(x, "input", formats=linear_formats(BF16))
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    assert content_of(table, "x fprop")["format"].startswith("mxfp8_e4m3")
    assert table.notes == [
        "this run quantises nothing: SQNR, underflow and saturation are what its operands would lose in mxfp8"
    ]


def statistics_alone(run: RunDir, fmt: str | None) -> list[dict[str, Any]]:
    """Write what capture=stats writes: the list of statistics, and no manifest."""
    lines = captured(run, iterations=(1, 3), fmt=fmt)
    lines = [{**one, "formats": linear_formats(MX8)} for one in lines]
    (run.tensors / "manifest.jsonl").unlink()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.tensors / "statistics.jsonl").write_text(text)
    return lines


def test_a_run_with_statistics_alone_is_shown_whole(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = statistics_alone(run, None)
    table = numerics(run, None, 1000, Deadline(-1.0))
    assert (table.iterations, table.layers) == ([1, 3], [0, 1])
    assert len(tensors_of(table)) == 5
    last = next(one for one in lines if one["iteration"] == 3)
    amax = last["statistics"]["abs_max"]
    assert content_of(table, "input")["abs_max"] == pytest.approx(amax, rel=1e-5), "six digits"
    assert content_of(table, "x fprop")["state"] == "statistics"
    (note,) = table.notes
    assert note == (
        "statistics alone were captured: SQNR, underflow and saturation need values (capture=tensors) or a format "
        "that judges while training runs (capture.format=mxfp8)"
    )


def test_statistics_with_a_format_have_an_sqnr(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = statistics_alone(run, "mxfp8")
    table = numerics(run, None, 1000, Deadline(-1.0))
    assert table.notes == []
    sqnr = [cell[3]["sqnr_db"] for cell in table.cells if "sqnr_db" in cell[3]]
    assert len(sqnr) == len(lines) == 20


def test_statistics_beside_values_are_not_shown_twice(capture: Capture) -> None:
    line_ = capture.add(torch.ones(4, 1, 32), "input", formats=linear_formats(MX8))
    numbers = {"count": 128, "abs_max": 7.0}
    for layer in (0, 1):
        other = {**line_, "layer": layer, "statistics": numbers}
        with (capture.dir / "statistics.jsonl").open("a") as stream:
            stream.write(json.dumps(other) + "\n")
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    assert content_of(table, "input", 0)["abs_max"] == 1.0, "by the values"
    assert content_of(table, "input", 1)["abs_max"] == 7.0, "of statistics alone"


def test_experts_share_a_cell_that_shows_the_worst_of_them(capture: Capture) -> None:
    generator = torch.Generator().manual_seed(1)
    sqnr = {}
    for expert in range(3):
        x = torch.randn(64, 64, generator=generator)
        x[:, ::8] *= 2.0 ** (4 * expert)
        capture.add(x.bfloat16(), "input", f"expert{expert}-fc1", formats=linear_formats(MX8))
        error = quantisation_error(x.bfloat16(), resolve("mxfp8_e4m3", scale_rule="rceil"), -1)
        sqnr[f"expert{expert}-fc1"] = error.sqnr_db
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    assert {row.module for row in table.rows} == {"expert-fc1"}
    slot = content_of(table, "x fprop")
    assert slot["experts"] == 3
    assert slot["sqnr_db"] == pytest.approx(min(sqnr.values()), rel=1e-4)
    assert slot["best_db"] == pytest.approx(max(sqnr.values()), rel=1e-4)
    assert slot["worst"] == min(sqnr, key=sqnr.__getitem__)
    tensor = content_of(table, "input")
    assert (tensor["count"], tensor["largest"]) == (3 * 64 * 64, "expert2-fc1")
    assert sum(tensor["bins"][1]) == 3 * 64 * 64


def test_the_expert_whose_error_is_infinite_is_the_worst(capture: Capture) -> None:
    formats = {"fprop.x": {"format": "hifp8", "saturate": False, "axis": "input_width"}}
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for expert in range(3):
        of_it = torch.cat([x, torch.full((4, 64), 50000.0)]) if expert == 1 else x
        capture.add(of_it, "input", f"expert{expert}-fc1", formats=formats)
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    slot = content_of(table, "x fprop")
    assert (slot["state"], slot["worst"]) == ("infinite", "expert1-fc1")
    assert "sqnr_db" not in slot
    assert slot["best_db"] > 0


def test_experts_without_any_number_have_the_state_failed(capture: Capture) -> None:
    for expert in range(2):
        line_ = capture.add(torch.ones(4, 32), "input", f"expert{expert}-fc1")
        (capture.dir / line_["file"]).unlink()
    table = numerics(RunDir(capture.run_dir), None, 100, Deadline(None))
    assert content_of(table, "input")["state"] == "failed"


def test_statistics_in_an_unknown_format_leave_a_cell_with_their_numbers(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    numbers = {"count": 4, "abs_max": 3.0, "mean": 0.0, "std": 1.5}
    judged = {"fidelity": {"format": "fp3", "axis": -1, "sqnr_db": 20.0}, **numbers}
    formats = {"fprop.x": {**MX8, "axis": "input_width"}}
    write(run, [line("forward", "qkv", "input", 0, statistics=judged, formats=formats)])
    table = numerics(run, None, 100, Deadline(None))
    content = content_of(table, "input")
    assert {key: content[key] for key in numbers} == numbers
    assert content["crest"] == 2.0
    assert "state" not in content
    slot = content_of(table, "x fprop")
    assert slot == {"of": 0, "state": "failed", "format": "mxfp8_e4m3"}, "fp3 is not judged"


def test_an_old_collection_without_a_manifest_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run-1" / "tensors" / "mxfp8"
    folder.mkdir(parents=True)
    name = "20250908_095220_0001_attention_L3_forward_pre_FA_mxfp8_query.pt"
    torch.save({"tensor": torch.full((4, 32), 2.0), "metadata": {}}, folder / name)
    table = numerics(RunDir(tmp_path / "run-1"), None, 100, Deadline(None))
    assert table.layers == [3]
    assert table.cells[0][3]["abs_max"] == 2.0

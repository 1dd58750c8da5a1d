from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch

from quantexp.analysis import numerics
from quantexp.analysis.measures.measured import Measured, Request, measure
from quantexp.analysis.numerics.chapter import CHAPTER, COLUMNS, csv_text, json_text
from quantexp.capture.reader import open_capture
from quantexp.capture.statistics.errors import Fidelity
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from tests.analysis.captures import HIF8, MX4, Capture, linear_formats

from .desks import MemoryDesk, add_run, normal, of_entries, source_of

EVERY_RUN = {"tensors_by_layer", "channels", "channel_profile", "heads"}
EVERY_GROUP = {"numerics_by_layer", "overflow", "scale_exponents", "forward_against_backward"}


@pytest.fixture
def desk(tmp_path: Path) -> MemoryDesk:
    return MemoryDesk(tmp_path / "out")


def rows(desk: MemoryDesk) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(desk.texts["numerics.csv"])))


def test_a_run_has_its_table_and_its_figures(capture: Capture, desk: MemoryDesk) -> None:
    desk.lays_out = True
    add_run(capture, settings=MX4)
    source = source_of(capture, "FA_linear_mxfp4")
    paths = CHAPTER.draw([source], desk)
    assert set(desk.figures) == EVERY_RUN | EVERY_GROUP | {"rows_against_columns"}
    assert len(paths) == len(desk.figures) + 2
    tensors = {(r["module"], r["layer"], r["tensor"]) for r in rows(desk)}
    assert len(tensors) == len(source.entries)
    (run,) = json.loads(desk.texts["numerics.json"]).values()
    assert len(run) == len(source.entries)
    label = source.label
    assert f"{label}: no iterations: one iteration alone" in desk.messages
    assert f"{label}: no ranks: one rank alone, nothing to compare" in desk.messages


def test_several_iterations_and_ranks_have_their_figures(
    capture: Capture, desk: MemoryDesk
) -> None:
    add_run(capture, settings=MX4, iterations=2, ranks=2)
    CHAPTER.draw([source_of(capture)], desk)
    assert {"iterations", "ranks"} <= set(desk.figures)
    assert desk.messages == []


def test_hifp8_has_its_deep_analysis_and_no_axes(capture: Capture, desk: MemoryDesk) -> None:
    desk.lays_out = True
    add_run(capture, settings=HIF8, quant_type="hifp8")
    source = source_of(capture)
    CHAPTER.draw([source], desk)
    assert {"hif8_tiers", "hif8_values"} <= set(desk.figures)
    message = f"{source.label}: no rows_against_columns: no tensor was judged along both axes"
    assert message in desk.messages
    shares = [r["tier_3_bits"] for r in rows(desk) if r["slot"]]
    assert shares
    assert all(shares)


def test_a_bf16_run_is_drawn_under_the_usual_formats(capture: Capture, desk: MemoryDesk) -> None:
    add_run(capture, layers=1, quant_type="bf16")
    CHAPTER.draw([source_of(capture, "bf16")], desk)
    ends = ("_mxfp8_e4m3-rceil", "_mxfp4_e2m1-floor", "_hifp8-current")
    expected = {name + end for name in EVERY_GROUP for end in ends}
    assert expected <= set(desk.figures)
    assert {r["declared"] for r in rows(desk)} == {"False", ""}


def test_several_runs_have_folders_of_their_own_and_one_table(
    tmp_path: Path, desk: MemoryDesk
) -> None:
    captures = [Capture(tmp_path / name) for name in ("first run", "second")]
    for one in captures:
        add_run(one, layers=1, settings=MX4)
    CHAPTER.draw([source_of(one) for one in captures], desk)
    assert {name.partition("/")[0] for name in desk.figures} == {"first-run", "second"}
    assert {r["run"] for r in rows(desk)} == {"first run", "second"}


def test_statistics_alone_are_drawn_over_their_iterations(
    capture: Capture, desk: MemoryDesk
) -> None:
    desk.lays_out = True
    lines = []
    for iteration in (1, 2, 3):
        for name in ("input", "grad_output"):
            x = normal(64, 64, seed=iteration, scale=2.0**-iteration)
            line = {
                **{"module": "fc1", "layer": 0, "layer_type": "linear", "phase": "pre"},
                **{"operation": "backward" if "grad" in name else "forward", "tensor": name},
                **{"iteration": iteration, "micro_batch": 0, "rank": 0, "quant_type": "mxfp4"},
                "statistics": statistics(x, chosen_for("mxfp4", name)),
            }
            lines.append(json.dumps(line))
    (capture.dir / "statistics.jsonl").write_text("\n".join(lines) + "\n")
    source = source_of(capture)
    assert source.entries == []
    CHAPTER.draw([source], desk)
    assert {"iterations", "numerics_by_layer_mxfp4_e2m1-floor"} <= set(desk.figures)
    table = rows(desk)
    assert [r["iteration"] for r in table] == ["1", "1", "2", "2", "3", "3"]
    assert {r["source"] for r in table} == {"statistics"}
    assert desk.num_looks == 0


def test_tensors_that_are_no_operands_have_the_figures_of_tensors(
    capture: Capture, desk: MemoryDesk
) -> None:
    desk.lays_out = True
    for name in ("output", "grad_output"):
        line = capture.add(normal(64, 1, 64), name, "fc1")
        line["layer_type"] = "residual"
    capture.write()
    source = source_of(capture)
    CHAPTER.draw([source], desk)
    assert set(desk.figures) == {
        *("tensors_by_layer", "forward_against_backward", "channels", "channel_profile"),
    }
    none = f"{source.label}: no numerics_by_layer: no operand of a matrix product was judged"
    assert none in desk.messages
    assert f"{source.label}: no heads: no tensor with heads was looked at" in desk.messages


def test_odd_tensors_are_in_the_table_with_a_note(capture: Capture, desk: MemoryDesk) -> None:
    desk.lays_out = True
    add_run(capture, layers=1, settings=MX4)
    odd = {
        "empty": torch.zeros(0, 1, 64),
        "all zero": torch.zeros(64, 1, 64),
        "constant": torch.full((64, 1, 64), 0.5),
        "nothing finite": torch.full((64, 1, 64), math.nan),
        "1 NaN or Inf": normal(64, 1, 64),
    }
    odd["1 NaN or Inf"][5, 0, 5] = math.inf
    formats = capture.lines[0]["formats"]
    for layer, x in enumerate(odd.values(), start=1):
        for name in ("input", "grad_output", "grad_input"):
            capture.add(x.to(torch.bfloat16), name, "fc1", layer, formats=formats)
    CHAPTER.draw([source_of(capture)], desk)
    notes = {(int(r["layer"]), r["tensor"]): r["notes"] for r in rows(desk)}
    for layer, note in enumerate(odd, start=1):
        assert notes[layer, "input"] == note
    assert set(desk.figures) >= EVERY_RUN | EVERY_GROUP


def test_a_capture_of_odd_tensors_alone_is_drawn(capture: Capture, desk: MemoryDesk) -> None:
    desk.lays_out = True
    formats = {"fprop.x": {**MX4, "axis": "input_width"}}
    for layer, value in enumerate((0.0, math.nan)):
        capture.add(torch.full((32, 1, 32), value), "input", "fc1", layer, formats=formats)
    capture.add(torch.zeros(0, 1, 32), "input", "fc1", 2, formats=formats)
    CHAPTER.draw([source_of(capture)], desk)
    assert "numerics_by_layer" in desk.figures
    assert [r["notes"] for r in rows(desk)] == ["all zero", "all zero", "nothing finite", "empty"]


def test_old_collections_without_a_manifest_are_drawn(tmp_path: Path, desk: MemoryDesk) -> None:
    folder = tmp_path / "old"
    (folder / "mxfp8").mkdir(parents=True)
    for counter, name in enumerate(("input", "weight")):
        file = f"20250908_095220_{counter:04d}_linear_forward_mxfp8_{name}.pt"
        torch.save({"tensor": normal(64, 64), "metadata": {}}, folder / "mxfp8" / file)
    capture = Capture(tmp_path / "unused")
    capture.dir, capture.run_dir = folder, folder
    CHAPTER.draw([source_of(capture)], desk)
    assert {"tensors_by_layer", "numerics_by_layer_mxfp8_e4m3-rceil"} <= set(desk.figures)
    assert {r["layer"] for r in rows(desk)} == {"-1"}


def test_a_source_without_tensors_has_no_files(capture: Capture, desk: MemoryDesk) -> None:
    add_run(capture, layers=1)
    source = source_of(capture)
    assert CHAPTER.draw([of_entries(source, [])], desk) == []
    assert desk.texts == {}


def measured(capture: Capture) -> list[Measured]:
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    capture.add(x, "input", layer=3, formats=linear_formats(MX4), quant_type="mxfp4")
    capture.add(x, "output", layer=3, quant_type="mxfp4")
    capture.add(x * 0, "grad_output", layer=3, formats=linear_formats(HIF8), quant_type="hifp8")
    return [measure(entry, Request()) for entry in open_capture(capture.dir)]


def test_every_operand_of_a_tensor_is_a_row_and_a_tensor_without_any_is_one(
    capture: Capture,
) -> None:
    tensors = measured(capture)
    rows = list(csv.DictReader(io.StringIO(csv_text({"a": tensors, "b": tensors[:1]}))))
    assert tuple(rows[0]) == COLUMNS
    places = [(r["run"], r["tensor"], r["slot"]) for r in rows]
    assert places == [
        ("a", "input", "fprop.x"),
        ("a", "input", "wgrad.x"),
        ("a", "output", ""),
        ("a", "grad_output", "dgrad.g"),
        ("a", "grad_output", "wgrad.g"),
        ("b", "input", "fprop.x"),
        ("b", "input", "wgrad.x"),
    ]
    first, judged = rows[0], tensors[0].operands[0]
    assert float(first["sqnr_db"]) == judged.fidelity.sqnr_db
    assert int(first["scale_exponent_max"]) == judged.scale_exponents.quantile(1.0)
    assert (first["layer"], first["shape"], first["source"]) == ("3", "64x1x64", "values")
    assert first["tier_3_bits"] == ""


def test_missing_numbers_are_empty_in_the_csv(capture: Capture) -> None:
    zero = list(csv.DictReader(io.StringIO(csv_text({"a": measured(capture)}))))[3]
    assert (zero["sqnr_db"], zero["kurtosis"], zero["channel_amax_ratio"]) == ("", "", "")
    assert (zero["notes"], zero["saturated_share"]) == ("all zero", "0.0")


def test_the_json_is_strict_and_holds_each_tensor_once(capture: Capture) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    tensors = measured(capture)
    content = json.loads(json_text({"a": tensors}), parse_constant=refuse)
    assert [one["tensor"] for one in content["a"]] == ["input", "output", "grad_output"]
    first, _, zero = content["a"]
    assert len(first["operands"]) == 2
    exponents = first["operands"][0]["scale_exponents"]
    assert sum(exponents["counts"]) == 64 * 64 // 32
    assert first["channels"]["profile"][0] == first["channels"]["amax_ratio"]
    assert zero["kurtosis"] is None
    assert zero["operands"][0]["sqnr_db"] is None


def test_an_infinite_number_is_a_text_in_the_json(capture: Capture) -> None:
    capture.add(torch.ones(32, 1, 32), "input", formats=linear_formats(MX4), quant_type="mxfp4")
    (entry,) = open_capture(capture.dir)
    content = json.loads(json_text({"a": [measure(entry, Request())]}))
    assert content["a"][0]["operands"][0]["sqnr_db"] == "inf"
    assert math.isinf(float(content["a"][0]["operands"][0]["sqnr_db"]))


def test_the_documentation_defines_every_column_and_every_figure() -> None:
    page = (Path(__file__).parents[3] / "docs" / "draw.md").read_text()
    for name in (*Fidelity._fields, "zero_blocks", "nan_blocks", "kurtosis", "channel_amax_ratio"):
        assert name in COLUMNS
        assert f"`{name}`" in page, name
    drawn = (
        Path(numerics.__file__).parent / name for name in ("chapter.py", "comparison_chapter.py")
    )
    names = {
        name
        for file in drawn
        for name in re.findall(
            r'(?:yield \(?\s*f?|save\([^"]*f?)"(?:\{folder\})?([a-z0-9_]+)', file.read_text()
        )
    }
    assert len(names) >= 15
    for name in names:
        assert f"`{name}" in page, name

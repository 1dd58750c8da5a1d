from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import torch

from quantexp.analysis import numerics
from quantexp.analysis.measures.measured import Measured, Request, measure
from quantexp.analysis.numerics.table import COLUMNS, csv_text, json_text
from quantexp.capture.reader import open_capture
from quantexp.capture.statistics.errors import Fidelity
from tests.analysis.captures import HIF8, MX4, Capture, linear_formats


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

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from quantexp.analysis.measures.measured import Measured, Request, measure
from quantexp.analysis.measures.table import MeasuresTable
from quantexp.analysis.quick import first_look as module
from quantexp.analysis.quick.first_look import FirstLook, captured_in, first_look
from quantexp.analysis.tensors.place import Kind
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.formats import hadamard

from .. import mxfp4  # noqa: TID252
from ..captures import BF16, HIF8, MX4, MX8, Capture, attention_formats, linear_formats  # noqa: TID252


def look(capture: Capture, folder: Path | None = None) -> FirstLook:
    table = None if folder is None else MeasuresTable(folder)
    return first_look(captured_in(capture.dir), table)


def as_statistics(capture: Capture, fmt: str | None = None) -> None:
    """Replace all tensors by their statistics, under a format or none."""
    lines = []
    for line in capture.lines:
        x = torch.load(capture.dir / line["file"])["tensor"]
        chosen = None if fmt is None else chosen_for(fmt, line["tensor"])
        lines.append({**line, "file": None, "statistics": statistics(x, chosen)})
    for line in capture.lines:
        (capture.dir / line["file"]).unlink(missing_ok=True)
    (capture.dir / "manifest.jsonl").unlink()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (capture.dir / "statistics.jsonl").write_text(text)


def test_each_slot_is_judged_once_although_two_lines_list_it(capture: Capture) -> None:
    w = torch.randn(64, 64)
    line = capture.add(w, "weight", formats=linear_formats(MX8))
    capture.add(w, "weight", formats=linear_formats(MX8), file=line["file"])
    (tensor,) = look(capture).tensors
    assert [operand.slot for operand in tensor.measured.operands] == ["fprop.w", "dgrad.w"]
    assert tensor.measured.count == w.numel()


def test_the_error_is_that_of_the_declared_format_and_axis(capture: Capture) -> None:
    x = torch.randn(64, 1, 96, generator=torch.Generator().manual_seed(1))
    x[..., 5] *= 1000
    capture.add(x, "input", formats=linear_formats(MX4))
    (tensor,) = look(capture).tensors
    fprop, wgrad = tensor.measured.operands
    plain = x.numpy()
    for operand, oracle in ((fprop, plain), (wgrad, np.moveaxis(plain, 0, -1).copy())):
        # Sums of float64 in another order.
        assert operand.fidelity.sqnr_db == pytest.approx(mxfp4.sqnr_db(oracle), rel=1e-12)
        assert operand.fidelity.underflow_share == mxfp4.shares(oracle)[0]
        assert operand.fidelity.saturated_share == mxfp4.shares(oracle)[1]
    assert fprop.fidelity.underflow_share > wgrad.fidelity.underflow_share


def test_statistics_alone_are_judged_as_the_capture_judged_them(capture: Capture) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    capture.add(x, "input", formats=linear_formats(MX4))
    as_statistics(capture, "mxfp4")
    summary = look(capture)
    (operand,) = summary.tensors[0].measured.operands
    assert not summary.has_values
    assert operand.slot == ""
    # The capture sums float32 squares.
    assert operand.fidelity.sqnr_db == pytest.approx(mxfp4.sqnr_db(x.numpy()), abs=1e-4)


def test_statistics_without_a_format_are_not_judged_and_have_magnitudes(capture: Capture) -> None:
    x = torch.randn(64, 96)
    capture.add(x, "input", formats=linear_formats(MX8))
    as_statistics(capture)
    summary = look(capture)
    assert not summary.is_judged
    assert summary.tensors[0].measured.abs_max == pytest.approx(float(x.abs().max()), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "exponent"),
    # amax 448 * 2^-3 = 56 needs 2^-3 in e4m3 (rceil); 56 = 1.75 * 2^5, so 2^3 in e2m1 (floor, emax 2);
    # of powers of two the largest that brings 56 to at most 15 is 2^-2, which is undone by 2^2.
    [(MX8, -3), (MX4, 3), (HIF8, 2)],
)
def test_the_scale_of_the_largest_element_follows_from_amax_alone(
    capture: Capture, settings: dict[str, object], exponent: int
) -> None:
    x = torch.ones(4, 32)
    x[2, 3] = -56.0
    formats = {"fprop.x": {**settings, "axis": "input_width"}}
    capture.add(x, "input", formats=formats)
    as_statistics(capture)
    assert list(look(capture).tensors[0].scales.values()) == [exponent]


def test_bf16_is_judged_in_mxfp8_as_an_undeclared_format(capture: Capture) -> None:
    capture.add(torch.randn(64, 64).to(torch.bfloat16), "input", formats=linear_formats(BF16))
    (tensor,) = look(capture).tensors
    assert {one.format for one in tensor.measured.operands} == {"mxfp8_e4m3 rceil"}
    assert not any(one.declared for one in tensor.measured.operands)


def test_a_quantised_operand_is_not_judged_again_and_scales_are_no_numbers(
    capture: Capture,
) -> None:
    capture.add(torch.randn(64, 64), "input_fprop", formats=linear_formats(MX8))
    codes = torch.full((64, 2), 120, dtype=torch.uint8)
    capture.add(codes, "input_fprop_scale", formats=linear_formats(MX8))
    summary = look(capture)
    assert [one.kind for one in summary.tensors] == [Kind.ACTIVATION, Kind.SCALE]
    assert not summary.is_judged
    assert summary.findings == {}


def test_hifp8_is_scaled_by_the_amax_of_the_whole_tensor(capture: Capture) -> None:
    x = torch.full((4096, 512), 1.0)
    x[:, ::3] = 1.0625
    x[1, 0] = 15 * 2.0**20  # alone in rows that are not sampled, but it moves every 1 to 2^-20
    capture.add(x, "input", formats={"fprop.x": HIF8})
    (operand,) = look(capture).tensors[0].measured.operands
    assert operand.fidelity.sqnr_db < 40


@pytest.mark.parametrize(
    ("tensor", "finding"),
    [
        (torch.zeros(0, 64), "empty"),
        (torch.zeros(64, 64), "all zero"),
        (torch.full((64, 64), 3.0), "constant"),
        (torch.full((64, 64), math.nan), "nothing finite"),
        (torch.full((64, 64), math.inf).to(torch.bfloat16), "nothing finite"),
    ],
)
def test_a_degenerate_tensor_is_named(capture: Capture, tensor: torch.Tensor, finding: str) -> None:
    capture.add(tensor, "grad_output", "fc2", 7, formats=linear_formats(MX8))
    assert look(capture).findings[finding] == ["fc2 L7 backward grad_output"]


def test_a_tensor_with_some_nan_is_named_and_judged(capture: Capture) -> None:
    x = torch.randn(64, 1, 1, 64)
    x[3, 0, 0, 3] = math.nan
    capture.add(x, "query", "attention", formats=attention_formats(MX8))
    summary = look(capture)
    assert summary.findings == {"NaN or Inf among the elements": ["attention L0 forward query"]}
    assert math.isfinite(summary.tensors[0].measured.operands[0].fidelity.sqnr_db)


def test_a_value_that_becomes_infinite_is_named(capture: Capture) -> None:
    formats = {"fprop.x": {"format": "hifp8", "saturate": False, "axis": "input_width"}}
    capture.add(torch.tensor([[1.0, 50000.0]]), "input", formats=formats)
    assert look(capture).findings == {"a value became infinite": ["fc1 L0 forward input"]}


def test_missing_and_corrupt_files_are_named_and_the_rest_is_judged(capture: Capture) -> None:
    lines = [capture.add(torch.randn(32, 32), name) for name in ("input", "output", "weight")]
    (capture.dir / lines[0]["file"]).unlink()
    (capture.dir / lines[1]["file"]).write_bytes(b"junk")
    summary = look(capture)
    names = [Path(line["file"]).name for line in lines]
    assert summary.findings == {"missing": [names[0]], "corrupt": [names[1]]}
    assert [one.kind for one in summary.tensors] == [Kind.WEIGHT]


@pytest.mark.parametrize("file", ["../../{}", "/etc/passwd", "a\0b"])
def test_a_file_outside_the_capture_folder_is_named_and_not_read(
    capture: Capture, tmp_path: Path, file: str
) -> None:
    torch.save({"tensor": torch.ones(4, 4)}, tmp_path / "secret.pt")
    capture.add(torch.randn(32, 32), "input")
    outside = capture.add(torch.randn(32, 32), "output", file=file.format("secret.pt"))
    summary = look(capture)
    name = Path(outside["file"]).name
    assert summary.findings == {"not a file of the capture folder": [name]}
    assert [one.measured.place.tensor for one in summary.tensors] == ["input"]


def test_a_name_longer_than_any_files_is_missing(capture: Capture) -> None:
    capture.add(torch.randn(4, 4), "input", file="x" * 5000)
    assert list(look(capture).findings) == ["missing"]


def test_an_unknown_declaration_is_named(capture: Capture) -> None:
    capture.add(torch.randn(32, 32), "input", formats={"fprop.x": {"format": "fp3"}})
    summary = look(capture)
    ((finding, names),) = summary.findings.items()
    assert finding.startswith("not judged: fc1 L0 forward input, slot fprop.x of the manifest")
    assert names == ["fc1 L0 forward input"]
    assert len(summary.tensors) == 1


def test_statistics_in_an_unknown_format_are_named(capture: Capture) -> None:
    capture.add(torch.randn(64, 64), "input")
    as_statistics(capture, "mxfp8")
    file = capture.dir / "statistics.jsonl"
    file.write_text(file.read_text().replace("mxfp8_e4m3", "fp3"))
    summary = look(capture)
    assert summary.tensors == ()
    assert summary.findings == {"statistics that cannot be read": ["fc1 L0 forward input"]}


def test_torn_lines_are_named(capture: Capture) -> None:
    capture.add(torch.randn(4, 4), "input")
    capture.write(tail='{"file": "torn')
    assert look(capture).findings == {"lines that a crash tore, left out": ["manifest.jsonl:2"]}


def test_the_number_of_torchs_threads_stays_the_same(capture: Capture) -> None:
    capture.add_layers(1, tokens=32)
    before = torch.get_num_threads()
    look(capture)
    assert torch.get_num_threads() == before


def test_an_empty_capture_is_an_empty_look(capture: Capture) -> None:
    assert look(capture) == FirstLook()
    assert not FirstLook().has_values


def test_measures_in_the_table_are_taken_without_reading_values(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.add_layers(1, tokens=32)
    capture.add(torch.zeros(4, 4), "grad_output", "fc2", 1)
    first = look(capture, tmp_path / "figures")
    monkeypatch.setattr(module, "measure", None)
    # Missing numbers are NaN, which differs from itself, so the looks are compared as text.
    assert str(look(capture, tmp_path / "figures")) == str(first)


def test_only_new_tensors_are_measured(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.add(torch.randn(4, 4), "input")
    look(capture, tmp_path)
    capture.add(torch.randn(4, 4), "output")
    measured: list[str] = []

    def measure_and_note(entry: CapturedTensor, request: Request) -> Measured:
        measured.append(str(entry.metadata.get("tensor")))
        return measure(entry, request)

    monkeypatch.setattr(module, "measure", measure_and_note)
    assert len(look(capture, tmp_path).tensors) == 2
    assert measured == ["output"]


@pytest.mark.parametrize("change", ["restored", "missing", "damaged"])
def test_measures_of_other_values_are_not_taken(
    capture: Capture, tmp_path: Path, change: str
) -> None:
    path = capture.dir / capture.add(torch.randn(4, 4), "input")["file"]
    whole = path.read_bytes()
    if change == "restored":
        path.unlink()
    look(capture, tmp_path)
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(whole if change == "restored" else b"junk")
    assert str(look(capture, tmp_path)) == str(look(capture))


def test_too_many_tensors_are_thinned_to_evenly_spread_iterations(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in range(1, 10):
        for name in ("input", "output"):
            capture.add(torch.randn(4, 4), name)["iteration"] = iteration
    capture.write()
    monkeypatch.setattr(module, "MOST_TENSORS", 6)
    summary = look(capture)
    assert summary.iterations == (1, 5, 9)
    assert len(summary.tensors) == 6


def test_a_hadamard_transform_along_the_axis_is_judged(capture: Capture) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    settings = {**MX4, "hadamard_block": 32, "axis": "input_width"}
    capture.add(x, "input", formats={"fprop.x": settings})
    (operand,) = look(capture).tensors[0].measured.operands
    oracle = mxfp4.sqnr_db(hadamard(x, axis=-1, block=32, signs=None, left=True).numpy())
    assert operand.fidelity.sqnr_db == pytest.approx(oracle, abs=1e-5)

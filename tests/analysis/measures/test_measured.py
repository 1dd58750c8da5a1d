from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import pad

from quantexp.analysis.measures.measured import Measured, Request, measure, of_statistics
from quantexp.analysis.measures.operand import Axis, UnderFormat
from quantexp.capture.reader import open_capture
from quantexp.capture.statistics.counts import Counts
from quantexp.capture.statistics.errors import quantisation_error
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.errors import CaptureError
from quantexp.formats import FORMATS, get_format, resolve
from tests.analysis.captures import HIF8, MX4, Capture, attention_formats, linear_formats

NONE = Request()


def only(capture: Capture, request: Request = NONE) -> Measured:
    """The measures of the only tensor in the capture."""
    (entry,) = open_capture(capture.dir)
    return measure(entry, request)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def by_slot(measured: Measured) -> dict[tuple[str, str, str], UnderFormat]:
    return {(o.slot, o.format, o.axis.value): o for o in measured.operands}


def test_moments_are_those_of_scipy(capture: Capture) -> None:
    x = (normal(64, 2, 96) ** 3).to(torch.bfloat16)
    x[0] = 0
    capture.add(x, "output")
    measured = only(capture)
    n = x.double().numpy().ravel()
    expected = [n.mean(), n.std(), abs(n).max(), stats.skew(n), stats.kurtosis(n, fisher=False)]
    # 1e-10: moments about the mean, taken from sums about another pivot.
    got = [measured.mean, measured.std, measured.abs_max, measured.skew, measured.kurtosis]
    np.testing.assert_allclose(got, expected, rtol=1e-10)
    assert (measured.count, measured.nonfinite) == (n.size, 0)
    assert measured.zero_share == (n == 0).mean()
    assert measured.operands == ()
    assert measured.notes == ()


def test_each_declared_slot_is_judged_along_the_axis_that_its_product_reduces_over(
    capture: Capture,
) -> None:
    x = normal(64, 1, 96)
    x[:, :, 5] *= 64
    capture.add(x, "input", formats=linear_formats(MX4), quant_type="mxfp4")
    judged = by_slot(only(capture))
    name = "mxfp4_e2m1 floor"
    assert set(judged) == {("fprop.x", name, "rows"), ("wgrad.x", name, "columns")}
    for (_, _, axis), operand in judged.items():
        dim = -1 if axis == "rows" else 0
        expected = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), dim)
        assert operand.fidelity == expected
        assert operand.declared
        assert operand.num_elements == x.numel()
    rows, columns = (o.fidelity.underflow_share for o in judged.values())
    assert rows > 3 * columns  # the loud channel drowns its blocks along the width


def test_an_axis_that_no_product_reduces_over_is_judged_for_comparison(capture: Capture) -> None:
    x = normal(64, 1, 2, 32)
    capture.add(x, "query", "attention", formats=attention_formats(MX4), quant_type="mxfp4")
    judged = by_slot(only(capture))
    other = judged[("", "mxfp4_e2m1 floor", "columns")]
    assert not other.declared
    assert other.fidelity == quantisation_error(x, resolve("mxfp4", scale_rule="floor"), 0)
    assert len(judged) == 2  # the copies of the backward products are the forward's


def test_scale_exponents_are_those_of_the_blocks_amax(capture: Capture) -> None:
    x = normal(32, 1, 64)
    x[:4, :, :32] = 0
    x[7, 0, 40] = math.nan
    capture.add(x, "input", formats=linear_formats(MX4), quant_type="mxfp4")
    operand = by_slot(only(capture))[("fprop.x", "mxfp4_e2m1 floor", "rows")]
    amax = x.float().numpy().reshape(-1, 32)
    amax = np.abs(amax).max(1)
    usable = amax[np.isfinite(amax) & (amax > 0)]
    exponents = np.frexp(usable)[1] - 1 - 2  # floor(log2 amax) - emax of E2M1
    expected = {int(e): int((exponents == e).sum()) for e in np.unique(exponents)}
    assert {e: n for e, n in operand.scale_exponents.items() if n} == expected
    assert (operand.zero_blocks, operand.nan_blocks) == (4, 1)


@pytest.mark.parametrize(
    "name", ["nvfp4", "fp8_1x128", "fp8_128x128", "nvfp4_16x16", "fp4_ue5m3", "mxint8"]
)
@pytest.mark.parametrize("columns", [128, 200])
def test_zero_blocks_have_no_exponent_in_any_format(
    capture: Capture, name: str, columns: int
) -> None:
    x = normal(256, 1, columns)
    x[:128] = 0
    x[:, :, 128:] = 0
    capture.add(x, "input", quant_type="bf16")
    operand = only(capture, Request((name,))).operands[0]
    rows, extent = get_format(name).across, get_format(name).block or 0
    blocks = pad(x.float()[:, 0], (0, -columns % extent)).unflatten(1, (-1, extent))
    used = int(blocks.unflatten(0, (-1, rows)).abs().amax((1, 3)).count_nonzero())
    assert operand.scale_exponents.total == used
    assert operand.zero_blocks == blocks.shape[0] // rows * blocks.shape[1] - used
    line = {"statistics": statistics(x, chosen_for(name, "input")), "layer_type": "linear"}
    (judged,) = of_statistics(line).operands
    assert judged.scale_exponents == operand.scale_exponents
    assert judged.zero_blocks == operand.zero_blocks


def test_a_tensor_scale_has_the_exponent_of_its_power_of_two(
    capture: Capture,
) -> None:
    x = torch.full((32, 1, 32), 3.0 * 2.0**-20, dtype=torch.bfloat16)
    capture.add(x, "input", formats=linear_formats(HIF8), quant_type="hifp8")
    operand = only(capture).operands[0]
    # 15 / (3 x 2^-20) = 5 x 2^20, of which 2^22 is the largest power of two below.
    assert operand.scale_exponents == Counts(-22, (1,))
    assert operand.axis is Axis.TENSOR
    assert operand.code_exponents == Counts(3, (x.numel(),))  # 3 x 2^-20 2^22 = 12


def test_a_run_without_formats_is_judged_under_the_requested_ones(capture: Capture) -> None:
    x = normal(64, 1, 64)
    capture.add(x, "grad_output", quant_type="bf16")
    judged = by_slot(only(capture, Request(("mxfp8", "mxfp4", "hifp8"))))
    assert {(slot, axis) for slot, _, axis in judged} == {
        ("dgrad.g", "rows"),
        ("wgrad.g", "columns"),
        ("dgrad.g", "tensor"),
        ("wgrad.g", "tensor"),
    }
    assert {name for _, name, _ in judged} == {
        "mxfp8_e4m3 rceil",
        "mxfp4_e2m1 floor",
        "hifp8 current",
    }
    assert not any(one.declared for one in judged.values())
    hif8 = judged[("dgrad.g", "hifp8 current", "tensor")].fidelity
    spec = resolve("hifp8", scaling="current", amax_target=224.0)
    assert hif8 == quantisation_error(x, spec, -1)


def test_the_request_limits_the_number_of_elements(capture: Capture) -> None:
    x = normal(256, 1, 256)
    capture.add(x, "input", formats=linear_formats(MX4), quant_type="mxfp4")
    judged = by_slot(only(capture, Request(num_elements=4096)))
    assert {slot for slot, _, _ in judged} == {"fprop.x", "wgrad.x"}
    for operand in judged.values():
        assert 0 < operand.num_elements <= 2 * 4096  # a strip of whole blocks may have more
        # 0.5 dB: 4096 of 65536 normally distributed elements stand for all of them to about 0.1 dB.
        dim = -1 if operand.axis is Axis.ROWS else 0
        whole = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), dim)
        assert abs(operand.fidelity.sqnr_db - whole.sqnr_db) < 0.5


@pytest.mark.parametrize(
    ("x", "note"),
    [
        (torch.zeros(0, 1, 32), "empty"),
        (torch.zeros(32, 1, 32), "all zero"),
        (torch.full((32, 1, 32), 2.0), "constant"),
        (torch.full((32, 1, 32), math.nan), "nothing finite"),
        (torch.tensor([1.0, math.inf, 2.0, 3.0] * 8).reshape(32, 1, 1), "8 NaN or Inf"),
    ],
)
def test_odd_tensors_have_a_note(capture: Capture, x: torch.Tensor, note: str) -> None:
    capture.add(x.to(torch.bfloat16), "input", formats=linear_formats(MX4), quant_type="mxfp4")
    assert only(capture).notes == (note,)


def test_a_tensor_in_another_layout_than_its_operand_is_not_judged_but_noted(
    capture: Capture,
) -> None:
    capture.add(normal(64, 32), "query", "attention", formats=attention_formats(MX4))
    measured = only(capture)
    assert measured.operands == ()
    (note,) = measured.notes
    assert note.startswith("not judged: must be [tokens, sequences, heads, head_dim] as captured")


def test_a_sample_is_judged_where_its_blocks_are_whole_with_the_moments_of_the_whole(
    capture: Capture,
) -> None:
    whole = normal(64, 1, 64)
    rows = [3, 17, 40]
    line = capture.add(whole[rows], "input", formats=linear_formats(MX4), quant_type="mxfp4")
    line |= {
        "sample": {"of": "rows", "axis": 0, "indices": rows, "shape": [64, 1, 64]},
        "statistics": statistics(whole),
    }
    capture.write()
    measured = only(capture)
    assert (measured.count, measured.std) == (whole.numel(), line["statistics"]["std"])
    assert [one.slot for one in measured.operands] == ["fprop.x"]
    assert measured.notes == ("wgrad.x not judged: a sample without whole blocks",)


def test_codes_of_scales_are_listed_and_not_judged(capture: Capture) -> None:
    capture.add(torch.full((4, 2), 127, dtype=torch.uint8), "input_fprop_scale")
    measured = only(capture)
    assert measured.notes == ("codes of block scales, not judged",)
    assert measured.operands == ()


def test_statistics_alone_give_the_fidelity_measured_during_the_capture() -> None:
    x = normal(64, 64)
    x[:2, :32] = 0
    line = {
        "module": "fc1",
        "layer": 2,
        "layer_type": "linear",
        "operation": "forward",
        "tensor": "input",
        "iteration": 5,
        "shape": [64, 64],
        "dtype": "bfloat16",
        "statistics": statistics(x, chosen_for("mxfp4", "input")),
    }
    measured = of_statistics(json.loads(json.dumps(line)))
    assert (measured.place.label, measured.place.iteration) == ("fc1 L2 forward input", 5)
    assert not measured.from_values
    n = x.double().numpy()
    assert math.isclose(measured.kurtosis, stats.kurtosis(n.ravel(), fisher=False), rel_tol=1e-10)
    (judged,) = measured.operands
    expected = quantisation_error(x, resolve("mxfp4", scale_rule="floor"), -1)
    assert (judged.format, judged.axis) == ("mxfp4_e2m1 floor", Axis.ROWS)
    # 1e-6: the capture's sums are of float32 squares.
    assert math.isclose(judged.fidelity.sqnr_db, expected.sqnr_db, rel_tol=1e-6)
    assert math.isclose(judged.fidelity.mse, expected.mse, rel_tol=1e-6)
    assert math.isclose(judged.fidelity.cosine, expected.cosine, rel_tol=1e-6)
    assert judged.fidelity.underflow_share == expected.underflow_share
    assert math.isnan(judged.fidelity.relative_error)
    assert (judged.zero_blocks, judged.scale_exponents.total) == (2, 126)


def test_statistics_of_exact_values_have_an_infinite_sqnr() -> None:
    x = torch.full((4, 32), 2.0, dtype=torch.bfloat16)
    line = {"statistics": statistics(x, chosen_for("mxfp4", "input")), "layer_type": "linear"}
    (judged,) = of_statistics(line).operands
    assert judged.fidelity.sqnr_db == math.inf
    assert judged.fidelity.mse == 0


def test_statistics_without_a_format_have_no_operand() -> None:
    assert of_statistics({"statistics": statistics(normal(4, 4))}).operands == ()


def test_values_that_cannot_be_read_are_an_error(capture: Capture) -> None:
    line = capture.add(normal(4, 1, 4), "input")
    (capture.dir / line["file"]).write_bytes(b"no tensor")
    with pytest.raises(CaptureError, match="is refused"):
        only(capture)


def test_options_that_a_format_does_not_have_are_named(capture: Capture) -> None:
    formats = {"fprop.x": {**MX4, "axis": "input_width", "scale_rule": "highest"}}
    capture.add(normal(32, 1, 32), "input", formats=formats)
    measured = only(capture)
    assert measured.operands == ()
    assert measured.notes[0].startswith("not judged: ")
    assert "slot fprop.x of the manifest: scale_rule must be one of floor," in measured.notes[0]
    assert "got 'highest'" in measured.notes[0]


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "bf16"])
def test_every_format_can_be_requested(capture: Capture, name: str) -> None:
    x = normal(64, 1, 64)
    x[:, :, 0] *= 2.0**-30
    capture.add(x, "input", quant_type="bf16")
    measured = only(capture, Request((name,)))
    assert measured.notes == ()
    fmt = get_format(name)
    assert len(measured.operands) == 2
    for one in measured.operands:
        assert (one.axis is Axis.TENSOR) == (fmt.block is None)
        assert one.fidelity.sqnr_db > 15
        expected = 1 if fmt.block is None else x.numel() // fmt.block
        assert one.scale_exponents.total + one.zero_blocks == expected


def test_nvfp4s_exponents_are_those_of_both_scales_together(capture: Capture) -> None:
    x = normal(32, 1, 64)
    capture.add(x, "input", quant_type="bf16")
    operand = only(capture, Request(("nvfp4",))).operands[0]
    # The scale of the tensor brings amax to 6 x 448, that of a block its amax to 6, rounded to E4M3.
    tensor = np.float32(float(x.abs().max())) / np.float32(6 * 448)
    amax = np.abs(x.float().numpy()).reshape(-1, 16).max(1)
    block = (amax / np.float32(6) / tensor).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exponents, counts = np.unique(np.frexp(block * tensor)[1] - 1, return_counts=True)
    assert {e: n for e, n in operand.scale_exponents.items() if n} == dict(
        zip(exponents.tolist(), counts.tolist(), strict=True)
    )

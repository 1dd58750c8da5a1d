from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quantexp.analysis.collection import read_collection
from quantexp.analysis.inventory import Kind
from quantexp.analysis.sample import SAMPLE_ELEMENTS
from quantexp.analysis.statistics import quantisation_error
from quantexp.analysis.survey import Survey, survey_tensors
from quantexp.formats import hadamard

from .captures import BF16, HIF8, MX4, MX8, Capture, attention_formats, linear_formats


def survey(capture: Capture) -> Survey:
    return survey_tensors(capture.dir, read_collection(capture.dir))


def test_each_slot_is_judged_once_although_two_records_list_it(capture: Capture) -> None:
    w = torch.randn(64, 64)
    line = capture.add(w, "weight", formats=linear_formats(MX8))
    capture.add(w, "weight", formats=linear_formats(MX8), file=line["file"])
    found = survey(capture)
    assert [o.declared.slot for o in found.operands] == ["w fprop", "w dgrad"]
    assert found.magnitudes[Kind.WEIGHT].finite == w.numel()


def test_the_error_is_that_of_the_declared_format_and_axis(capture: Capture) -> None:
    x = torch.randn(64, 1, 96)
    x[..., 5] *= 1000
    capture.add(x, "input", formats=linear_formats(MX4))
    fprop, wgrad = (o.fidelity for o in survey(capture).operands)
    # The order of sums depends on the number of threads: the last of 16 digits may differ.
    for found, axis in ((fprop, -1), (wgrad, 0)):
        whole = quantisation_error(x, "mxfp4", axis, {"scale_rule": "floor"})
        assert found == pytest.approx(whole, rel=1e-12)
    assert fprop.underflow_share > wgrad.underflow_share


def test_bf16_tensors_are_surveyed(capture: Capture) -> None:
    capture.add(torch.randn(64, 64).to(torch.bfloat16), "input", formats=linear_formats(BF16))
    found = survey(capture)
    assert found.magnitudes[Kind.INPUT].finite == 4096
    assert found.operands == []
    assert found.findings == {}


def test_a_quantised_operand_is_not_judged_again_and_scales_are_no_numbers(
    capture: Capture,
) -> None:
    capture.add(torch.randn(64, 64), "input_fprop", formats=linear_formats(MX8))
    codes = torch.full((64, 2), 120, dtype=torch.uint8)
    capture.add(codes, "input_fprop_scale", formats=linear_formats(MX8))
    found = survey(capture)
    assert set(found.magnitudes) == {Kind.INPUT}
    assert found.operands == []
    assert found.findings == {}


def test_kinds_are_added_up_over_tensors(capture: Capture) -> None:
    capture.add_layers(2, tokens=32)
    found = survey(capture)
    assert set(found.magnitudes) == {Kind.INPUT, Kind.WEIGHT, Kind.OUTPUT, Kind.GRADIENT}
    # Per layer: q, k (fprop), and six slots in each of four linear modules.
    assert len(found.operands) == 2 * (2 + 4 * 6)
    assert all(25 < o.fidelity.sqnr_db < 40 for o in found.operands)


@pytest.mark.parametrize("dim", [0, -1])
def test_a_large_tensor_is_sampled_and_close_to_the_whole(capture: Capture, dim: int) -> None:
    x = torch.randn(2 * SAMPLE_ELEMENTS // 512, 512, generator=torch.Generator().manual_seed(5))
    capture.add(x, "input", formats=linear_formats(MX8))
    found = survey(capture)
    assert found.magnitudes[Kind.INPUT].finite == SAMPLE_ELEMENTS
    whole = quantisation_error(x, "mxfp8", dim, {"scale_rule": "rceil"})
    # 0.05 dB: half a million samples of a normal distribution scatter by about 0.02 dB.
    assert abs(found.operands[dim + 1].fidelity.sqnr_db - whole.sqnr_db) < 0.05


def test_hifp8_is_scaled_by_the_amax_of_the_whole_tensor(capture: Capture) -> None:
    x = torch.full((4 * SAMPLE_ELEMENTS // 512, 512), 1.0)
    x[:, ::3] = 1.0625
    x[1, 0] = 15 * 2.0**20  # alone in rows that are not sampled, but it moves every 1 to 2^-20
    capture.add(x, "input", formats={"fprop.x": HIF8})
    (one,) = survey(capture).operands
    assert one.fidelity.sqnr_db < 40


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
def test_a_tensor_with_nothing_to_see_is_named(
    capture: Capture, tensor: torch.Tensor, finding: str
) -> None:
    capture.add(tensor, "grad_output", "fc2", 7, formats=linear_formats(MX8))
    assert survey(capture).findings[finding] == ["fc2 L7 backward grad_output"]


def test_a_tensor_with_some_nan_is_named_and_judged(capture: Capture) -> None:
    x = torch.randn(64, 64)
    x[3, 3] = math.nan
    capture.add(x, "query", "attention", formats=attention_formats(MX8))
    found = survey(capture)
    assert found.findings == {"NaN or Inf among the elements": ["attention L0 forward query"]}
    assert math.isfinite(found.operands[0].fidelity.sqnr_db)


@pytest.mark.parametrize(
    ("tensor", "settings", "finding"),
    [
        (torch.tensor([1.0, 2.0] * 32), MX8, "SQNR infinite, nothing was rounded"),
        (torch.tensor([math.nan, 1.0]), MX8, "SQNR undefined"),
        (
            torch.tensor([1.0, 50000.0]),
            {"format": "hifp8", "saturate": False},
            "SQNR -inf, a value became infinite",
        ),
    ],
)
def test_an_error_that_no_axis_can_show_is_named(
    capture: Capture, tensor: torch.Tensor, settings: dict[str, object], finding: str
) -> None:
    capture.add(tensor, "input", formats={"fprop.x": {**settings, "axis": "input_width"}})
    assert survey(capture).findings[finding] == ["fc1 L0 forward input as x fprop"]


def test_missing_and_corrupt_files_are_named_and_the_rest_goes_on(capture: Capture) -> None:
    lines = [capture.add(torch.randn(32, 32), name) for name in ("input", "output", "weight")]
    (capture.dir / lines[0]["file"]).unlink()
    (capture.dir / lines[1]["file"]).write_bytes(b"junk")
    found = survey(capture)
    names = [Path(line["file"]).name for line in lines]
    assert found.findings == {"missing": [names[0]], "corrupt": [names[1]]}
    assert list(found.magnitudes) == [Kind.WEIGHT]


def test_a_declaration_that_is_not_understood_is_named(capture: Capture) -> None:
    capture.add(torch.randn(32, 32), "input", formats={"fprop.x": {"format": "fp3"}})
    found = survey(capture)
    assert found.findings == {"declaration not understood": ["fc1 L0 forward input"]}
    assert Kind.INPUT in found.magnitudes


def test_torchs_threads_are_left_as_they_were(capture: Capture) -> None:
    capture.add_layers(1, tokens=32)
    before = torch.get_num_threads()
    survey(capture)
    assert torch.get_num_threads() == before


def test_statistics_only_has_nothing_to_survey(capture: Capture) -> None:
    capture.add(torch.ones(2), "input")["file"] = None
    capture.write()
    assert survey(capture) == Survey()


def test_a_transformed_operand_is_judged_as_it_was_transformed(capture: Capture) -> None:
    x = torch.randn(64, 1, 32)
    x[5] = 20.0
    signs = [1, -1] * 16
    transform = {"hadamard": "random", "hadamard_block": 32, "signs": signs}
    formats = {
        "fprop.x": {**MX4, "axis": "input_width"},
        "wgrad.x": {**MX4, **transform, "axis": "tokens"},
    }
    capture.add(x, "input", formats=formats)
    _, wgrad = (o.fidelity for o in survey(capture).operands)
    signs_ = torch.tensor(signs, dtype=torch.float32)
    moved = hadamard(x, axis=0, signs=signs_, left=False)  # of wgrad's g^T x
    assert wgrad == pytest.approx(quantisation_error(moved, "mxfp4", 0), rel=1e-12)


def test_delayed_scales_are_those_of_the_capture(capture: Capture) -> None:
    x = torch.randn(64, 1, 32)
    for amax in (0.01, None):
        delayed = {**HIF8, "scaling": "delayed", "window": 16, "amax": amax}
        capture.add(x, "input", formats={"fprop.x": delayed})
    small, own = (o.fidelity for o in survey(capture).operands)
    given = {"scaling": "delayed", "amax": torch.tensor(0.01)}
    assert small == pytest.approx(quantisation_error(x, "hifp8", -1, given), rel=1e-12)
    assert own == pytest.approx(
        quantisation_error(x, "hifp8", -1, {"scaling": "current"}), rel=1e-12
    )
    assert own.sqnr_db > small.sqnr_db

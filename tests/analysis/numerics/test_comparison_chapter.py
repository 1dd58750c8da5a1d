from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quantexp.analysis.numerics.comparison import contestants, labels_of
from quantexp.analysis.numerics.comparison_chapter import CHAPTER, drift, drift_from
from quantexp.analysis.numerics.series import runs_of
from quantexp.capture.reader import open_capture
from tests.analysis.captures import HIF8, MX4, Capture

from .desks import MemoryDesk, add_run, normal, run_of, source_of


@pytest.fixture
def desk(tmp_path: Path) -> MemoryDesk:
    return MemoryDesk(tmp_path / "out")


def captures(tmp_path: Path) -> tuple[Capture, Capture]:
    first, second = Capture(tmp_path / "one"), Capture(tmp_path / "two")
    add_run(first, layers=1, settings=MX4)
    add_run(second, layers=1, settings=HIF8, quant_type="hifp8")
    return first, second


def test_two_schemes_are_beside_each_other(tmp_path: Path, desk: MemoryDesk) -> None:
    desk.lays_out = True
    first, second = captures(tmp_path)
    sources = [source_of(first, "FA_linear_mxfp4"), source_of(second, "FA_linear_hifp8")]
    CHAPTER.draw(sources, desk)
    assert set(desk.figures) == {
        "error_by_scheme",
        "magnitudes_by_scheme",
        "difference_FA_linear_hifp8",
    }


def test_the_marks_are_the_medians_of_the_tensors(tmp_path: Path, desk: MemoryDesk) -> None:
    first, second = captures(tmp_path)
    sources = [source_of(first, "FA_linear_mxfp4"), source_of(second, "FA_linear_hifp8")]
    CHAPTER.draw(sources, desk)
    (ax, *_) = desk.figures["error_by_scheme"].axes
    drawn = sorted(
        float(np.asarray(line.get_xdata())[0])
        for line in ax.get_lines()
        if line.get_marker() != "None"
    )
    run = runs_of(sources)
    judged = [o for r in run for one in r.tensors for o in one.operands if o.slot]
    assert drawn == sorted(o.fidelity.sqnr_db for o in judged)  # one layer: each median is a tensor


def test_a_bf16_run_compares_the_formats_it_is_judged_under(
    capture: Capture, desk: MemoryDesk
) -> None:
    add_run(capture, layers=1, quant_type="bf16")
    CHAPTER.draw([source_of(capture, "bf16")], desk)
    assert set(desk.figures) == {"error_by_scheme"}


def test_one_scheme_alone_is_not_compared(capture: Capture, desk: MemoryDesk) -> None:
    add_run(capture, layers=1, settings=MX4)
    assert CHAPTER.draw([source_of(capture)], desk) == []


def test_runs_of_one_scheme_go_by_their_names(capture: Capture) -> None:
    add_run(capture, layers=1, settings=MX4)
    run = run_of(capture)

    runs = [run, replace(run, label="another")]
    assert labels_of(runs) == {"a run": "a run", "another": "another"}
    assert [c.label for c in contestants(runs)] == ["a run", "another"]


def test_formats_of_several_runs_name_their_scheme(capture: Capture) -> None:
    add_run(capture, layers=1)

    run = run_of(capture, "mxfp8", scheme="bf16")
    runs = [run, replace(run, label="another", scheme="bf16 too")]
    assert [c.label for c in contestants(runs)] == [
        "mxfp8_e4m3 rceil (bf16)",
        "mxfp8_e4m3 rceil (bf16 too)",
    ]


def test_runs_without_a_tensor_in_common_have_a_message_and_no_difference(
    tmp_path: Path, desk: MemoryDesk
) -> None:
    first, second = Capture(tmp_path / "one"), Capture(tmp_path / "two")
    first.add(normal(32, 1, 32), "output", "fc1", 0)
    second.add(normal(32, 1, 32), "output", "fc1", 1)
    CHAPTER.draw([source_of(first, "bf16"), source_of(second, "other")], desk)
    assert set(desk.figures) == {"magnitudes_by_scheme"}
    assert desk.messages == ["two: no tensor that one has too, no difference drawn"]


def test_drift_is_the_norm_of_the_difference_over_that_of_the_reference() -> None:
    a, b = torch.randn(300, 40), torch.randn(300, 40)
    n, m = a.double().numpy(), b.double().numpy()
    expected = np.linalg.norm(n - m) / np.linalg.norm(n)
    # 1e-12: sums of 12,000 float64 squares in another order.
    assert math.isclose(drift(a, b), expected, rel_tol=1e-12)
    assert drift(a, a) == 0
    assert math.isclose(drift(a, 3 * a), 2, rel_tol=1e-6)


def test_drift_leaves_out_nonfinite_values_and_is_nan_from_zeros() -> None:
    a = torch.tensor([3.0, math.nan, 4.0, math.inf])
    b = torch.tensor([3.0, 1.0, 9.0, 1.0])
    assert drift(a, b) == 1.0
    assert math.isnan(drift(torch.zeros(4), b))
    assert math.isnan(drift(torch.zeros(0), torch.zeros(0)))


def test_the_same_tensor_has_the_same_shape(tmp_path: Path) -> None:
    first, second = Capture(tmp_path / "one"), Capture(tmp_path / "two")
    for one, width in ((first, 32), (second, 64)):
        one.add(torch.ones(32, 1, width), "output", "fc1", 0)
        one.add(torch.ones(32, 1, 8), "input", "fc1", 0)
    drifts = [drift_from(e, str(first.dir)) for e in open_capture(second.dir)]
    assert drifts == [None, 0.0]

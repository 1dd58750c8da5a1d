from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.analysis.quick.by_kind import OfKind, by_kind, representable
from quantexp.analysis.quick.first_look import captured_in, first_look
from quantexp.analysis.tensors.place import Kind
from quantexp.formats.spec import get_format

from .. import mxfp4  # noqa: TID252
from ..captures import BF16, MX4, MX8, Capture, attention_formats, linear_formats  # noqa: TID252
from .test_first_look import as_statistics


def kinds(capture: Capture) -> dict[Kind, OfKind]:
    return {one.kind: one for one in by_kind(first_look(captured_in(capture.dir)))}


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_elements_are_counted_by_the_exponent_of_their_magnitude(capture: Capture) -> None:
    x, y = normal(64, 64), normal(32, 64, seed=2) * 2.0**-9
    x[0, :7] = 0
    capture.add(x, "input", formats=linear_formats(MX4))
    capture.add(y, "output", formats=linear_formats(MX4))
    of = kinds(capture)[Kind.ACTIVATION]
    both = np.concatenate([x.numpy().ravel(), y.numpy().ravel()]).astype(np.float64)
    exponents, counts = np.unique(np.floor(np.log2(np.abs(both[both != 0]))), return_counts=True)
    assert {e: n for e, n in of.exponents.items() if n} == dict(zip(exponents, counts, strict=True))
    assert (of.num_finite, of.num_zeros) == (both.size, 7)


def test_the_range_is_that_of_the_format_at_the_scale_of_the_median_block(
    capture: Capture,
) -> None:
    x = normal(64, 64) * torch.logspace(-3, 3, 64)[:, None]
    capture.add(x, "input", formats={"fprop.x": {**MX4, "axis": "input_width"}})
    bounds = kinds(capture)[Kind.ACTIVATION].range
    scale = 2.0 ** np.sort(mxfp4.scales_of(x.numpy()))[63]  # of 128 blocks
    assert bounds is not None
    assert (bounds.least, bounds.least_normal, bounds.largest) == (0.5 * scale, scale, 6 * scale)
    assert bounds.of_median


def test_statistics_without_a_format_have_the_range_at_the_scale_of_the_largest_element(
    capture: Capture,
) -> None:
    x = normal(64, 64) * torch.logspace(-3, 3, 64)[:, None]
    capture.add(x, "input", formats={"fprop.x": {**MX4, "axis": "input_width"}})
    as_statistics(capture)
    activations = kinds(capture)[Kind.ACTIVATION]
    scale = 2.0 ** mxfp4.scales_of(x.numpy()).max()
    assert activations.range is not None
    assert (activations.range.largest, activations.range.of_median) == (6 * scale, False)
    assert activations.formats == ("mxfp4_e2m1",)
    assert activations.underflow == activations.saturated == activations.sqnr_db == ()


def test_shares_and_errors_are_those_of_every_operand(capture: Capture) -> None:
    tensors = [normal(64, 64, seed=seed) ** 3 for seed in range(3)]
    for layer, x in enumerate(tensors):
        formats = {"fprop.w": {**MX4, "axis": "input_width"}}
        capture.add(x, "weight", layer=layer, formats=formats)
    of = kinds(capture)[Kind.WEIGHT]
    expected = [mxfp4.shares(x.numpy()) for x in tensors]
    assert of.underflow == tuple(one[0] for one in expected)
    assert of.saturated == tuple(one[1] for one in expected)
    assert of.sqnr_db == pytest.approx([mxfp4.sqnr_db(x.numpy()) for x in tensors], rel=1e-12)


def test_statistics_with_a_format_agree_with_values(capture: Capture) -> None:
    x = normal(64, 64)
    capture.add(x, "input", formats={"fprop.x": {**MX4, "axis": "input_width"}})
    values = kinds(capture)[Kind.ACTIVATION]
    as_statistics(capture, "mxfp4")
    statistics = kinds(capture)[Kind.ACTIVATION]
    assert statistics.exponents == values.exponents
    assert statistics.range == values.range
    assert statistics.underflow == values.underflow
    assert statistics.sqnr_db == pytest.approx(values.sqnr_db, abs=1e-4)


def test_the_formats_are_those_of_the_scheme_whatever_the_format_of_the_statistics(
    capture: Capture,
) -> None:
    capture.add(normal(64, 64), "input", formats=linear_formats(MX4))
    capture.add(normal(32, 1, 1, 64), "query", "attention", formats=attention_formats(BF16))
    as_statistics(capture, "mxfp8")
    all_kinds = kinds(capture)
    assert all_kinds[Kind.ACTIVATION].formats == ("mxfp4_e2m1",)
    assert all_kinds[Kind.ACTIVATION].range is not None
    assert not all_kinds[Kind.ACTIVATION].range.of_median
    assert all_kinds[Kind.ATTENTION].formats == ()
    assert all_kinds[Kind.ATTENTION].sqnr_db


def test_kinds_are_separate_and_an_unquantised_one_has_no_range(capture: Capture) -> None:
    for name in ("query", "key", "value"):
        capture.add(normal(32, 1, 1, 64), name, "attention", formats=attention_formats(BF16))
    for name in ("input", "weight", "grad_output"):
        capture.add(normal(64, 64), name, formats=linear_formats(MX8))
    all_kinds = kinds(capture)
    assert list(all_kinds) == [Kind.ACTIVATION, Kind.WEIGHT, Kind.ATTENTION, Kind.GRADIENT]
    assert all_kinds[Kind.ATTENTION].formats == ()
    assert all_kinds[Kind.ATTENTION].range is None
    assert all_kinds[Kind.GRADIENT].formats == ("mxfp8_e4m3",)


def test_a_quantised_copy_does_not_count_again(capture: Capture) -> None:
    capture.add(normal(64, 64), "input", formats=linear_formats(MX4))
    capture.add(normal(64, 64), "input_fprop", formats=linear_formats(MX4))
    assert kinds(capture)[Kind.ACTIVATION].num_finite == 64 * 64


@pytest.mark.parametrize(
    ("name", "least", "normal_", "largest"),
    [
        ("mxfp4", 0.5, 1.0, 6.0),
        ("mxfp8", 2.0**-9, 2.0**-6, 448.0),
        ("mxfp8_e5m2", 2.0**-16, 2.0**-14, 57344.0),
        ("hifp8", 2.0**-22, 2.0**-15, 2.0**15),
    ],
)
def test_the_range_of_a_format_is_that_of_its_specification(
    name: str, least: float, normal_: float, largest: float
) -> None:
    assert representable(get_format(name)) == (least, normal_, largest)

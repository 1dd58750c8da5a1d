"""Totals of parts are those of the whole tensor, and equal its statistics."""

from __future__ import annotations

import math

import pytest
import torch

from quantexp.capture.statistics.counts import from_json
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.moments import Totals
from quantexp.capture.statistics.summary import all_totals, statistics, summarise

CHOSEN = chosen_for("mxfp8", "input")


def planted() -> torch.Tensor:
    """Eight rows of two blocks with small, large and zero values."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[0, :32] *= 2.0**-20
    x[0, 0] = 448.0  # the rest of its block underflows
    x[3, 40:50] = 0
    return x


def test_totals_are_the_recorded_statistics() -> None:
    x = planted()
    record = statistics(x, CHOSEN)
    (totals,) = all_totals([summarise(x, CHOSEN)])
    assert totals.amax == record["abs_max"] == 448
    assert totals.magnitudes == from_json(record["log2_magnitude"])
    fidelity = record["fidelity"]
    assert totals.sqnr_db == fidelity["sqnr_db"]
    assert totals.underflow_share == fidelity["underflow_share"] > 0
    assert totals.saturated_share == fidelity["saturated_share"]


def test_totals_of_parts_are_those_of_the_whole() -> None:
    x = planted()
    parts = all_totals([summarise(part, CHOSEN) for part in (x[:3], x[3:])])
    (whole,) = all_totals([summarise(x, CHOSEN)])
    together = parts[0] + parts[1]
    # The compiled code adds parts of the sums in float32.
    assert together.sqnr_db == pytest.approx(whole.sqnr_db, rel=2**-24)
    assert together.underflow_share == whole.underflow_share
    assert (together.amax, together.magnitudes) == (whole.amax, whole.magnitudes)
    assert parts[0].underflow_share != together.underflow_share


def test_tensors_with_and_without_a_format_are_copied_together() -> None:
    x = planted()
    plain, scored = all_totals([summarise(x), summarise(x, CHOSEN)])
    assert (plain.amax, plain.magnitudes) == (scored.amax, scored.magnitudes)
    assert (plain.judged, scored.judged) == (0, 512)
    assert math.isnan(plain.sqnr_db)
    assert all_totals([]) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_tensor_without_a_finite_element_has_no_amax(value: float) -> None:
    (totals,) = all_totals([summarise(torch.full((4, 32), value, dtype=torch.bfloat16), CHOSEN)])
    assert totals.amax is None
    assert math.isnan(totals.saturated_share)
    assert (totals + Totals(amax=2.0)).amax == 2.0


def test_magnitudes_beyond_the_bins_are_counted_in_the_outer_ones() -> None:
    x = torch.tensor([2.0**-100, 2.0**100, 1.0, 0.0], dtype=torch.bfloat16)
    (totals,) = all_totals([summarise(x)])
    assert dict(item for item in totals.magnitudes.items() if item[1]) == {-65: 1, 0: 1, 32: 1}

"""Statistics of a whole tensor from those of its parts: the oracle is the whole tensor's own statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantexp.capture.captured import combined
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics

EXACT = ("count", "zeros", "nonfinite", "nan", "inf", "zero_share", "min", "max", "abs_max")
MOMENTS = {"mean": 1, "std": 2, "skew": 3, "kurtosis": 4}


def skewed(*shape: int) -> torch.Tensor:
    """Parts along the first axis have unlike means and spreads; with zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[0])[:, None]
    x += torch.linspace(-5, 9, shape[0])[:, None]
    x[0, ::7], x[1, 3], x[2, :2] = 0.0, math.nan, math.inf
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 2, 5), (8,)])
def test_statistics_of_parts_are_those_of_the_whole(
    dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    x = skewed(8, 300).to(dtype)
    whole = statistics(x)
    record = combined([statistics(part) for part in x.split(sizes)])
    assert {key: record[key] for key in EXACT} == {key: whole[key] for key in EXACT}
    assert record["log2_magnitude"] == whole["log2_magnitude"]
    assert record["quantiles"] is None
    assert record.keys() == whole.keys()
    for key, power in MOMENTS.items():
        # The sums of the k-th powers are rounded at 1e-16 of the largest one, some thousand times in another order.
        scale = 1 if key in ("mean", "std") else whole["std"] ** power
        limit = 1e-12 * whole["abs_max"] ** power / scale
        assert record[key] == pytest.approx(whole[key], rel=1e-12, abs=limit), key


def test_parts_without_finite_elements_or_any_elements_count_too() -> None:
    parts = [torch.full((2, 2), math.nan), torch.empty(0, 2), torch.tensor([[1.0, -3.0]])]
    record, whole = combined([statistics(part) for part in parts]), statistics(torch.cat(parts))
    assert {key: record[key] for key in (*EXACT, *MOMENTS)} == {
        key: whole[key] for key in (*EXACT, *MOMENTS)
    }
    nothing = combined([statistics(parts[0])] * 2)
    assert (nothing["count"], nothing["nan"], nothing["mean"], nothing["max"]) == (8, 8, None, None)


def test_equal_elements_have_no_skewness() -> None:
    record: dict[str, Any] = combined([statistics(torch.full((3,), 2.0))] * 2)
    assert (record["mean"], record["std"], record["skew"], record["kurtosis"]) == (2, 0, None, None)


def test_the_fidelity_of_parts_is_not_that_of_the_whole() -> None:
    record = statistics(torch.ones(2, 32), chosen_for("mxfp8_e4m3", "input"))
    assert record["fidelity"] is not None
    assert combined([record, record])["fidelity"] is None

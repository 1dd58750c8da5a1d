from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from en_dtypes import hifloat8

from quantexp.analysis.measures.hif8 import Tier, code_counts, tier_of, tier_shares
from quantexp.capture.statistics.counts import Counts
from quantexp.formats import resolve

CURRENT = resolve("hifp8", scaling="current", amax_target=15.0)


@pytest.mark.parametrize(
    ("exponents", "tier", "values"),
    [
        (range(-3, 4), Tier.THREE, 8),
        ((-7, -4, 4, 7), Tier.TWO, 4),
        ((-15, -8, 8, 14), Tier.ONE, 2),
        (range(-22, -15), Tier.NONE, 1),
    ],
)
def test_a_tier_has_as_many_values_in_a_binade_as_in_the_paper(
    exponents: range, tier: Tier, values: int
) -> None:
    codes = np.arange(1, 0x80, dtype=np.uint8).view(hifloat8).astype(np.float32)
    for exponent in exponents:
        assert tier_of(exponent) is tier
        assert ((codes >= 2.0**exponent) & (codes < 2.0 ** (exponent + 1))).sum() == values


@pytest.mark.parametrize("exponent", [-23, 16])
def test_beyond_the_format_there_is_no_tier(exponent: int) -> None:
    with pytest.raises(ValueError, match=f"must lie between -22 and 15, got {exponent}"):
        tier_of(exponent)


def test_codes_are_counted_by_the_exponent_that_en_dtypes_gives_the_rounded_value() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(4)).float() ** 5
    scale = 2.0 ** math.floor(math.log2(15 / float(x.abs().max())))
    q = (x.numpy() * scale).astype(hifloat8).astype(np.float64)
    expected = np.bincount(np.frexp(np.abs(q[q != 0]))[1] - 1 + 22)
    counts = code_counts(x, CURRENT)
    assert {e: n for e, n in counts.items() if n} == {
        e - 22: n for e, n in enumerate(expected.tolist()) if n
    }


def test_zero_nan_and_inf_have_no_exponent() -> None:
    x = torch.tensor([0.0, math.nan, math.inf, 1.0, 2.0**-30])
    counts = code_counts(x, resolve("hifp8", saturate=False))
    assert counts == Counts(0, (1,))
    assert code_counts(torch.zeros(0), resolve("hifp8")) == Counts()


def test_shares_of_the_tiers_are_of_the_nonzero_codes() -> None:
    shares = tier_shares(Counts(-16, (1, 1, *[0] * 11, 3, *[0] * 6, 5)))
    assert shares == {Tier.THREE: 0.3, Tier.TWO: 0.5, Tier.ONE: 0.1, Tier.NONE: 0.1}
    of_nothing = tier_shares(Counts())
    assert set(of_nothing) == set(Tier)
    assert all(math.isnan(share) for share in of_nothing.values())

"""The vectorised gold against Fractions, and detection of a wrong one."""

from __future__ import annotations

import numpy as np
import pytest

from quantexp.extras.verify import exact
from quantexp.extras.verify.exact import KINDS
from quantexp.extras.verify.gold_check import check_gold
from quantexp.extras.verify.tally import Tally


@pytest.mark.parametrize("fmt", KINDS)
def test_the_gold_agrees_with_rational_arithmetic(fmt: str) -> None:
    tally = Tally()
    check_gold(fmt, tally)
    (row,) = tally.rows
    assert row.cases > 5000
    assert row.mismatches == 0, row.examples


@pytest.mark.parametrize("fmt", [name for name in KINDS if name != "bf16"])
def test_a_gold_that_rounds_wrongly_is_detected(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_down(element: str, v: np.ndarray, saturate: bool, ties: str = "even") -> np.ndarray:
        return right(element, np.nextafter(v, 0), saturate, ties)

    right = exact.nearest  # type: ignore[attr-defined]
    monkeypatch.setattr(exact, "nearest", half_down)
    tally = Tally()
    check_gold(fmt, tally)
    assert tally.mismatches > 0

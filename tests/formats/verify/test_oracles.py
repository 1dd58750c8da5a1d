"""The oracles: what each supports, where it is correct, and the message for an absent one."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from quantexp.formats.verify import cases
from quantexp.formats.verify.exact import Case, answer
from quantexp.formats.verify.grids import ELEMENTS, code_values, nearest
from quantexp.formats.verify.oracles import ORACLES, find_oracles, torchao_oracle
from quantexp.formats.verify.oracles.oracle import Oracle
from quantexp.formats.verify.tally import differing

PRESENT, ABSENT = find_oracles()


def oracle(name: str) -> Oracle:
    return next(one for one in PRESENT if one.name == name)


def test_all_oracles_are_there_with_their_versions() -> None:
    assert [one.name for one in PRESENT] == list(ORACLES)
    assert ABSENT == {}
    for one in PRESENT:
        assert one.version.split("+")[0] == version(one.name).split("+")[0]


@pytest.mark.parametrize("name", ["ml_dtypes", "gfloat", "en_dtypes"])
def test_an_oracle_that_cannot_be_imported_is_named_with_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"quantexp.formats.verify.oracles.{name}_oracle")
    present, absent = find_oracles()
    assert name not in [one.name for one in present]
    assert list(absent) == [name]
    assert "cannot be imported" in absent[name]
    assert absent[name].endswith("pip install 'quantexp[verify]'")


def test_an_oracle_whose_functions_changed_is_absent_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torchao_oracle.mx_tensor, "to_mx")  # type: ignore[attr-defined]
    present, absent = find_oracles()
    assert "torchao" not in [one.name for one in present]
    assert absent["torchao"].startswith("this version cannot be used: AttributeError")


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ties", ["even", "away"])
@pytest.mark.parametrize("saturate", [True, False])
def test_every_oracle_rounds_an_element_as_the_gold_does(
    element: str, ties: str, saturate: bool
) -> None:
    v = np.abs(cases.hard_values(element)).astype(np.float64)
    if element in ("e2m3", "e3m2", "e2m1"):  # no NaN, always saturating
        v, saturate = v[np.isfinite(v)], True
    able = [one for one in PRESENT if one.can_round(element, ties, saturate)]
    for one in able:
        theirs = one.rounded(element, v, saturate, ties)
        assert not differing(nearest(element, v, saturate, ties), theirs).any(), one.name
    if saturate and (element, ties) != ("hif8", "even"):
        assert able


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_oracle_gives_an_elements_codes_the_golds_values(element: str) -> None:
    tables = [(one.name, one.code_values(element)) for one in PRESENT]
    theirs = {name: values for name, values in tables if values is not None}
    assert len(theirs) >= (1 if element == "hif8" else 2)
    for values in theirs.values():
        assert not differing(code_values(element), values).any()


def test_torchao_counts_only_where_it_follows_the_definitions() -> None:
    """One block of each excluded kind, next to one that counts."""
    x = np.ones((5, 32), np.float32)
    x[1, 3] = np.nan
    x[2, 3] = np.inf
    x[3] = 2.0**-130
    x[4, 0] = np.nextafter(np.float32(448 * 2.0**7), np.float32(9e9))
    case = Case("mxfp8_e4m3", x, options={"scale_rule": "rceil"})
    opinion = oracle("torchao").opinion(case, answer(case))
    assert opinion is not None
    assert opinion.known_blocks is not None
    assert opinion.known_blocks[:, 0].tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"axis": 0},
        {"strided": True},
        {"options": {"rounding": "away"}},
        {"options": {"block": 16}},
        {"options": {"pre_scale": True}},
    ],
)
def test_torchao_has_no_opinion_on_unsupported_cases(changed: dict[str, Any]) -> None:
    case = Case("mxfp4_e2m1", np.ones((32, 32), np.float32), **changed)
    assert torchao_oracle.blocks(case, answer(case)) is None


def test_no_oracle_has_an_opinion_on_stochastic_rounding() -> None:
    for fmt in ("mxfp8_e4m3", "nvfp4_e2m1", "hifp8", "fp8_e5m2"):
        case = Case(
            fmt, np.ones((2, 32), np.float32), options={"rounding": "stochastic", "seed": 1}
        )
        assert all(one.opinion(case, answer(case)) is None for one in PRESENT)

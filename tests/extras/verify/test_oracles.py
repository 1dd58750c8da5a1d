"""The oracles: what each supports, where it is correct, and the message for an absent one."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import gfloat
import numpy as np
import pytest

from quantexp.extras.verify import cases
from quantexp.extras.verify.exact import Case, answer
from quantexp.extras.verify.grids import ELEMENTS, code_values, nearest
from quantexp.extras.verify.oracles import (
    ORACLES,
    find_oracles,
    gfloat_oracle,
    torchao_oracle,
)
from quantexp.extras.verify.oracles.oracle import Oracle
from quantexp.extras.verify.rational import MX_ELEMENTS
from quantexp.extras.verify.tally import differing

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
    monkeypatch.delitem(sys.modules, f"quantexp.extras.verify.oracles.{name}_oracle")
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
@pytest.mark.parametrize("ties", ["even", "away", "zero"])
@pytest.mark.parametrize("saturate", [True, False])
def test_every_oracle_rounds_an_element_as_the_gold_does(
    element: str, ties: str, saturate: bool
) -> None:
    v = np.abs(cases.hard_values(element)).astype(np.float64)
    saturate |= ties == "zero"
    if element in ("e2m3", "e3m2", "e2m1"):  # always saturating, and NaN only in gfloat
        v, saturate = v[np.isfinite(v)], True
    able = [one for one in PRESENT if one.can_round(element, ties, saturate)]
    for one in able:
        theirs = one.rounded(element, v, saturate, ties)
        assert not differing(nearest(element, v, saturate, ties), theirs).any(), one.name
    if saturate and (element != "hif8" or ties == "away"):
        assert able


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_oracle_gives_an_elements_codes_the_golds_values(element: str) -> None:
    tables = [(one.name, one.code_values(element)) for one in PRESENT]
    theirs = {name: values for name, values in tables if values is not None}
    assert len(theirs) >= (1 if element == "hif8" else 2)
    for values in theirs.values():
        assert not differing(code_values(element), values).any()


#: Blocks with NaN and Inf, of zeros, and of the smallest values.
SPECIAL = np.ones((7, 32), np.float32)
SPECIAL[0, 0], SPECIAL[1, 0], SPECIAL[2, :2], SPECIAL[3] = np.nan, np.inf, (np.inf, np.nan), np.nan
SPECIAL[4], SPECIAL[5], SPECIAL[6] = 0.0, -0.0, 2.0**-149


def require_exact(case: Case) -> None:
    """torchao's opinion leaves out the blocks whose scale differs, and the elements of others whose code differs."""
    gold = answer(case)
    opinion = oracle("torchao").opinion(case, gold)
    assert opinion is not None
    theirs = opinion.answer
    assert gold.block_scales is not None
    assert theirs.block_scales is not None
    assert gold.codes is not None
    assert theirs.codes is not None
    assert opinion.known is not None
    scales = differing(gold.block_scales, theirs.block_scales)
    elements = differing(gold.codes, theirs.codes) | differing(gold.values, theirs.values)
    assert opinion.known_blocks is not None
    assert np.array_equal(opinion.known_blocks, ~scales)
    assert np.array_equal(opinion.known, ~scales & ~elements)
    assert scales.any()
    assert elements.any()


@pytest.mark.parametrize("fmt", torchao_oracle.TYPES)
def test_what_is_excluded_of_torchaos_blocks_is_what_differs(fmt: str) -> None:
    """60 steps above every max 2^k, where its rceil is too low, 5 below, and all other hard amaxes."""
    largest = float(MX_ELEMENTS[fmt][3])
    centres = np.ldexp(largest, np.arange(-140, 127))
    centres = centres[centres < 2.0**127].astype(np.float32)
    bits = centres.view(np.uint32)[:, None] + np.arange(-5, 60).astype(np.uint32)
    amaxes = bits.astype(np.uint32).reshape(-1, 1).view(np.float32)
    spread = amaxes * np.linspace(-1, 1, 32, dtype=np.float32)
    for rule in ("floor", "rceil", "ceil", "even"):
        x = np.concatenate([cases.hard_blocks(fmt, rule), spread, SPECIAL])
        require_exact(Case(fmt, x, options={"scale_rule": rule}))


@pytest.mark.parametrize("t", [2.0**-117, 0.0007, 3.7, 2.0**60])
def test_what_is_excluded_of_torchaos_nvfp4_blocks_is_what_differs(t: float) -> None:
    values = np.random.default_rng(0).standard_normal((2000, 16)) * t
    values *= np.exp2(np.linspace(-12, 10, 2000))[:, None]
    x = np.concatenate([cases.hard_nv_blocks(t), SPECIAL[:, :16], values.astype(np.float32)])
    require_exact(Case("nvfp4_e2m1", x, options={"amax": 2688 * t}))


def test_torchaos_rceil_is_lower_by_the_rounding_of_a_logarithm() -> None:
    """The steps of float32 above 448 2^k at which its scale is too low, as docs/formats.md has them."""
    for exponents, most in [
        ((-3, 3), 0),
        ((-5, -8, 4, 7), 2),
        ((-9, -16, 8, 15), 4),
        ((-17, -32, 16, 31), 9),
        ((-33, -64, 32, 63), 20),
        ((-65, -126, 64, 119), 39),
        ((-127,), 40),
    ]:
        for k in exponents:
            bits = np.float32(448 * 2.0**k).view(np.uint32) + np.arange(100, dtype=np.uint32)
            x = np.zeros((100, 32), np.float32)
            x[:, 0] = bits.view(np.float32)
            _, scales = torchao_oracle.mx_codes(x, "mxfp8_e4m3", "rceil")
            right = k + 127 + (np.arange(100) > 0)
            assert np.flatnonzero(scales[:, 0] != right).tolist() == list(range(1, most + 1)), k


def test_gfloat_returns_nan_for_an_element_without_nan() -> None:
    assert np.isnan(oracle("gfloat").rounded("e2m1", np.array([np.nan]), True, "even")).all()
    with pytest.raises(ValueError, match="No NaN"):
        gfloat.round_float(gfloat_oracle.INFOS["e2m1"], np.nan, sat=True)


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

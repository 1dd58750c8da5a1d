"""Whole tensors by the gold; `gold_check` compares their values with Fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quantexp.extras.verify import cases, rational
from quantexp.extras.verify.exact import (
    BLOCKS,
    KINDS,
    TARGETS,
    Case,
    answer,
    decoded,
    scale_exponents,
    tensor_scale,
    to_bf16,
    to_dtype,
)
from quantexp.extras.verify.tally import differing
from quantexp.formats import FORMATS


def test_all_formats_have_the_parameters_of_their_specifications() -> None:
    assert list(KINDS) == list(FORMATS)
    for name, fmt in FORMATS.items():
        kind, element = KINDS[name]
        assert fmt.element.name == element
        assert fmt.block == BLOCKS.get(kind)
        assert fmt.amax_target == TARGETS.get(name)
        assert Case(name, np.ones(1)).rounding == fmt.rounding.value


@pytest.mark.parametrize("name", rational.MX_ELEMENTS)
@pytest.mark.parametrize("rule", rational.SCALE_RULES)
def test_scales_are_those_of_fractions(name: str, rule: str) -> None:
    amaxes = np.append(cases.hard_amaxes(name)[::5], np.float32(0)).astype(np.float64)
    expected = [rational.mx_scale(Fraction(a), name, rule) for a in amaxes]
    assert scale_exponents(amaxes, name, rule).tolist() == expected


@pytest.mark.parametrize(
    ("fmt", "options", "scale"),
    [
        ("hifp8", {}, 1.0),
        ("hifp8", {"scaling": "current"}, 2.0),
        ("hifp8", {"scaling": "exact"}, 2.5),
        ("hifp8", {"scaling": "exact", "amax_target": 224.0, "amax": 7.0}, 32.0),
        ("fp8_e4m3", {"scaling": "current"}, 64.0),
        ("fp8_e4m3", {"scaling": "current", "amax": 2.0**-149}, 2.0**127),
        ("nvfp4_e2m1", {"scaling": "current"}, 2.0**-8),
        ("nvfp4_e2m1", {"amax": 2688.0 * 3}, 3.0),
        ("nvfp4_e2m1", {"amax": 1e-44}, 2.0**-117),
        ("nvfp4_e2m1", {"amax": 0.0}, 1.0),
    ],
)
def test_the_scale_of_a_tensor(fmt: str, options: dict[str, Any], scale: float) -> None:
    """amax is 6; NaN and Inf do not count."""
    x = np.array([1.0, -6.0, math.nan, math.inf], np.float32)
    assert tensor_scale(Case(fmt, x, options=options)) == np.float32(scale)


def test_bf16_is_that_of_ml_dtypes_over_all_upper_halves_and_ties() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert not differing(expected, to_bf16(x)).any()


def test_dtypes_round_to_nearest_even() -> None:
    x = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65520.0, 2.0**-25, np.nan], np.float32)
    expected = np.array([1.0, 1 + 2.0**-9, np.inf, 0.0, np.nan], np.float32)
    assert not differing(expected, to_dtype(x, "float16")).any()
    assert not differing(x, to_dtype(x, "float32")).any()


def test_a_short_last_block_has_a_scale_of_its_own() -> None:
    x = np.concatenate([np.full(32, 448.0), np.full(3, 0.5)])[None].astype(np.float32)
    gold = answer(Case("mxfp8_e4m3", x))
    assert gold.block_scales is not None
    assert gold.block_scales.tolist() == [[127, 127 - 9]]
    assert gold.values.tolist() == x.tolist()


@pytest.mark.parametrize("fmt", [name for name in KINDS if name != "bf16"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_golds_codes_stand_for_its_values(fmt: str, axis: int) -> None:
    x = cases.solid()[:, :, :32]
    gold = answer(Case(fmt, x, axis=axis, options={"block": 4} if fmt[0] in "mn" else {}))
    assert gold.codes is not None
    scales = gold.block_scales
    if scales is not None:
        scales = np.repeat(scales, 4, axis=axis).take(range(x.shape[axis]), axis=axis)
    values = decoded(fmt, gold.codes, scales, gold.tensor_scale)
    assert not differing(values, gold.values).any()

"""Block scales over all of float32 and around every threshold, against rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from quantexp.extras.verify import rational as gold
from quantexp.extras.verify.cases import hard_amaxes
from quantexp.formats import FORMATS, ScaleRule
from quantexp.formats.rounding import can_saturate, power_of_two, scale_field


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
@pytest.mark.parametrize("rule", ScaleRule)
def test_every_scale_agrees_with_rational_arithmetic(name: str, rule: ScaleRule) -> None:
    """Every seventh bfloat16, and the float32 values next to each threshold of a rule."""
    every_seventh = torch.arange(1, 0x7F80, 7, dtype=torch.int16).view(torch.bfloat16).float()
    amaxes = [*every_seventh.tolist(), *hard_amaxes(name).tolist()]
    bits = torch.tensor(amaxes).view(torch.int32)
    biased = scale_field(bits, FORMATS[name].element, rule) >> 23
    expected = [gold.mx_scale(Fraction(amax), name, rule.value) + 127 for amax in amaxes]
    assert biased.tolist() == expected


@pytest.mark.parametrize("name", gold.MX_ELEMENTS)
@pytest.mark.parametrize("rule", ScaleRule)
def test_rules_that_cannot_saturate_never_do(name: str, rule: ScaleRule) -> None:
    element = FORMATS[name].element
    amax = torch.randint(1, 0x7F800000, (1 << 18,), generator=torch.Generator().manual_seed(21))
    bits = amax.to(torch.int32)
    s = (scale_field(bits, element, rule) >> 23).double() - 127
    beyond = bits.view(torch.float32).double() > element.max * torch.exp2(s)
    assert bool(beyond.any()) is can_saturate(rule)


def test_zero_has_the_smallest_scale_and_no_number_has_the_field_of_all_ones() -> None:
    amax = torch.tensor([0.0, float("inf"), float("nan")]).view(torch.int32)
    for rule in ScaleRule:
        field = scale_field(amax, FORMATS["mxfp8_e4m3"].element, rule)
        assert (field >> 23).tolist() == [0, 255, 255]


def test_powers_of_two_are_exact_for_all_255_scales() -> None:
    field = torch.arange(256, dtype=torch.int32) << 23
    values = power_of_two(field).numpy().astype(np.float64)
    np.testing.assert_array_equal(values[:255], np.exp2(np.arange(255.0) - 127))
    assert np.isnan(values[255])

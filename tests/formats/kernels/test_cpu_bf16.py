"""bfloat16 by the compiled kernel, which computes in integers, against the exact results of `quantexp verify`."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.extras.verify.exact import Case, answer
from quantexp.formats import FORMATS, finite_amax, quantise, quantise_both, resolve
from quantexp.formats.types import Family, ScaleRule

from ..tensors import as_numpy, assert_same, every_value  # noqa: TID252
from .builds import assert_same_bits, by_torch, every_build, seeded

MX = [name for name, fmt in FORMATS.items() if fmt.family is Family.MX]
#: A whole block, and a short one.
WIDTH = 32 + 13
#: Exponent fields and mantissas, as bits of bfloat16: around the changes of a scale, around the amaxes from which
#: integers are used, the largest, the subnormals and zero, Inf and NaN.
AMAXES = [
    exponent << 7 | mantissa
    for exponents, mantissas in (
        (
            [127],
            [0, 1, 0x3F, 0x40, 0x41, 0x5F, 0x60, 0x61, 0x6F, 0x70, 0x71, 0x77, 0x78, 0x79, 0x7F],
        ),
        ([1, 4, 5, 6, 7, 9, 10, 18, 19, 32, 33, 254], [0, 0x45, 0x7F]),
        ([0], [0, 1, 0x45, 0x7F]),
        ([255], [0, 0x7F]),
    )
    for exponent, mantissa in itertools.product(exponents, mantissas)
]


@cache
def every_value_under_every_amax() -> Tensor:
    """Rows of two blocks with one amax, and between them all values up to it."""
    bits = every_value(torch.bfloat16).view(torch.int16).to(torch.int32)
    rows = []
    for amax in AMAXES:
        values = bits[(bits & 0x7FFF) <= amax]
        num_rows = -(-len(values) // (WIDTH - 2))
        row = torch.full((num_rows, WIDTH), amax, dtype=torch.int32)
        places = torch.arange(num_rows * (WIDTH - 2)) % len(values)
        row[:, 1:-1] = values[places].view(num_rows, WIDTH - 2)
        rows.append(row)
    return torch.cat(rows).to(torch.int16).view(torch.bfloat16)


@cache
def exact(name: str, rule: ScaleRule, axis: int) -> np.ndarray:
    x = as_numpy(every_value_under_every_amax())
    return answer(Case(name, x, "bfloat16", axis, {"scale_rule": rule.value})).values


@every_build
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rule", ScaleRule)
def test_every_value_under_every_amax_is_exact(build: str, name: str, rule: ScaleRule) -> None:
    """In blocks along memory and across it, in place, and for both copies from one read."""
    x = every_value_under_every_amax()
    transposed = x.t().contiguous()
    along, across = exact(name, rule, -1), exact(name, rule, 0)
    for y, axis, expected in (
        (x.clone(), -1, along),
        (x.clone(), 0, across),
        (transposed.clone(), 0, along.T),
    ):
        assert quantise(y, name, out=y, axis=axis, scale_rule=rule) is y
        assert_same(y, expected)
    columns, rows = quantise_both(transposed, resolve(name, scale_rule=rule), axes=(0, 1))
    assert_same(columns, along.T)
    assert_same(rows, across.T)


def test_the_values_are_all_and_every_amax_is_that_of_a_block() -> None:
    x = every_value_under_every_amax()
    assert len(x.view(torch.int16).unique()) == 1 << 16
    magnitudes = x.view(torch.int16) & 0x7FFF
    for block in (magnitudes[:, :32], magnitudes[:, 32:]):
        assert set(block.amax(dim=1).tolist()) == set(AMAXES)


@every_build
@pytest.mark.parametrize("block", [1, 8, 32, 256])
def test_a_block_that_needs_floats_leaves_its_neighbours_exact(build: str, block: int) -> None:
    """One NaN, one subnormal amax, in an otherwise usual tensor."""
    x = torch.randn(320, 520, generator=seeded(4)).to(torch.bfloat16)
    x[40, 70] = torch.nan
    x[256:, 300], x[130, 256:] = 2.0**-130, 2.0**-130
    for axis in (0, 1):
        options: dict[str, Any] = {"axis": axis, "block": block}
        assert_same_bits(quantise(x, "mxfp8", **options), by_torch(x, "mxfp8", **options))


@cache
def exact_hifp8(**options: Any) -> np.ndarray:
    x = as_numpy(every_value(torch.bfloat16))
    return answer(Case("hifp8", x, "bfloat16", options=options)).values


def assert_hifp8_is_exact(**options: Any) -> None:
    """In place, and in a tensor that does not fill its last vector."""
    expected = exact_hifp8(**options)
    if "amax" in options:
        options["amax"] = torch.tensor(options["amax"])
    for first in (0, 7):
        y = every_value(torch.bfloat16)[first:].clone()
        quantise(y, "hifp8", out=y, **options)
        assert_same(y, expected[first:])


@every_build
def test_every_value_under_every_power_of_two_is_exact_in_hifp8(build: str) -> None:
    """Integers are used for 2^-112 to 2^103."""
    for exponent in range(-126, 128):
        assert_hifp8_is_exact(scaling="current", amax=1.0, amax_target=2.0**exponent)


@every_build
@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("saturate", [True, False])
def test_every_value_under_every_option_is_exact_in_hifp8(
    build: str, rounding: str, saturate: bool
) -> None:
    options: dict[str, Any] = {"rounding": rounding, "saturate": saturate}
    assert_hifp8_is_exact(**options)
    for scaling in ("current", "delayed", "exact"):
        for amax in (2.0**-120, 2.0**-100, 0.7, 15.0, 2.0**115, 2.0**120):
            assert_hifp8_is_exact(scaling=scaling, amax=amax, **options)
    for scaling in ("current", "exact"):
        assert_hifp8_is_exact(scaling=scaling, **options)


@every_build
def test_the_amax_is_the_largest_finite_magnitude(build: str) -> None:
    """Of either sign, first and last among smaller ones, NaN and Inf."""
    sign = 1 << 15
    others = [0, sign, 1, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC0] * 12
    for amax in (amax for amax in [*AMAXES, 0x7F7F] if amax < 0x7F80):
        for bits in ([amax, *others], [*others, max(amax - 1, 0), amax | sign]):
            x = torch.tensor(bits).to(torch.int16).view(torch.bfloat16)
            expected = torch.tensor([max(amax, 1)]).to(torch.int16).view(torch.bfloat16)
            assert finite_amax(x) == expected.float()
    assert finite_amax(torch.full((64,), torch.nan, dtype=torch.bfloat16)) == 0

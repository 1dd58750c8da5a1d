"""MX of bfloat16 by the compiled kernel, which computes in integers, against the exact results of `quantexp verify`."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.formats import FORMATS, quantise, quantise_both, resolve
from quantexp.formats.types import Family, ScaleRule
from quantexp.formats.verify.exact import Case, answer

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

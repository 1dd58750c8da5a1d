"""The bounds of products against torch's own matrix products, in every dtype, and against planted errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantexp.formats import Hadamard, resolve
from quantexp.formats.transform import hadamard
from quantexp.proof.products import (
    Reference,
    are_right,
    num_wrong,
    num_wrong_rows,
    project,
    reference,
)
from quantexp.proof.turning import turned_back

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(16, 64, 24), (128, 2048, 96), (3, 5, 7)]


def operands(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Values over many binades, as gradients have."""
    M, K, N = shape
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(*extents, generator=generator)
        * torch.exp2(torch.randint(-8, 3, extents, generator=generator))
        for extents in ((M, K), (K, N))
    )
    return left.to(dtype), right.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_products_are_within_the_bounds(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for seed in range(20):
        left, right = operands(shape, dtype, seed)
        out = torch.matmul(left, right)
        assert num_wrong(out, reference(left, right)) == 0
        assert num_wrong_rows(out, project(left, right, 1.0, seed)) == 0


@pytest.mark.parametrize("exponent", [-84, 64])
def test_squares_may_leave_the_range_of_float32(exponent: int) -> None:
    left, right = operands((64, 128, 96), torch.bfloat16, 1)
    left = left * 2.0**exponent
    out, projection = torch.matmul(left, right), project(left, right, 1.0, 0)
    assert num_wrong_rows(out, projection) == 0
    out[17] *= -1
    assert num_wrong_rows(out, projection) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_rounded_products_is_within_the_bounds(dtype: torch.dtype) -> None:
    first, second = (operands((32, 256, 32), dtype, seed) for seed in (1, 2))
    total = torch.matmul(*first) + torch.matmul(*second)
    expected = reference(*first).plus(reference(*second)).again()
    assert num_wrong(total, expected) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_one_wrong_row_or_column_is_seen_by_the_projection(
    dtype: torch.dtype, transposed: bool
) -> None:
    left, right = operands((128, 512, 96), dtype, 3)
    if transposed:
        left = left.t().contiguous().t()
    projection = project(left, right, 1.0, 0)
    out = torch.matmul(left, right)
    assert num_wrong_rows(out, projection) == 0
    row = out.clone()
    row[17] = 0
    assert num_wrong_rows(row, projection) == 1
    column = out.clone()
    column[:, 5] *= -1
    assert num_wrong_rows(column, projection) > 64


@pytest.mark.parametrize("factor", [1.25, 1.0 + 2.0**-5, -1.0, 0.0])
def test_a_scaled_product_is_wrong(factor: float) -> None:
    left, right = operands((16, 256, 64), torch.bfloat16, 4)
    out = torch.matmul(left, right)
    assert num_wrong((out * factor).bfloat16(), reference(left, right)) > 1000


def test_a_product_of_operands_without_quantisation_is_wrong() -> None:
    """E4M3's error of 2.6% is well above bf16's rounding of 0.4%."""
    left, right = operands((16, 256, 64), torch.bfloat16, 5)
    coarse = left.to(torch.float8_e4m3fn).bfloat16()
    out = torch.matmul(left, right)
    assert num_wrong(out, reference(coarse, right)) > 500


def test_16_bit_sums_are_wrong() -> None:
    """Sums that are rounded to bf16 after every 16 terms, as a narrow accumulator does."""
    left, right = operands((16, 1024, 64), torch.bfloat16, 6)
    out = torch.zeros(16, 64, dtype=torch.bfloat16)
    for k in range(0, 1024, 16):
        out += torch.matmul(left[:, k : k + 16], right[k : k + 16])
    assert num_wrong(out, reference(left, right)) > 100


def test_numbers_below_the_normal_ones_may_be_zero() -> None:
    left = torch.full((4, 8), 2.0**-127, dtype=torch.bfloat16)
    right = torch.ones(8, 4, dtype=torch.bfloat16)
    assert num_wrong(torch.zeros(4, 4, dtype=torch.bfloat16), reference(left, right)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bound_of_the_sums_counts_where_terms_cancel(dtype: torch.dtype) -> None:
    """256 terms of magnitude 1 cancel: 8 sqrt(256) 2^-24 sqrt(256) sqrt(256) = 2^-9; rounding adds nothing."""
    left, right = torch.ones(1, 256, dtype=dtype), torch.ones(256, 1, dtype=dtype)
    right[::2] = -1
    expected = reference(left, right)
    for out, wrong in ((2.0**-10, 0), (2.0**-8, 1), (torch.nan, 1)):
        seen = torch.full((1, 1), out, dtype=dtype)
        assert num_wrong(seen, expected) == wrong
        assert are_right([(seen, expected)]) is not bool(wrong)
    some = torch.zeros(1, 1, dtype=dtype), torch.full((1, 1), 2.0**-8, dtype=dtype)
    assert not are_right([(seen, expected) for seen in some])


def test_what_is_beyond_the_dtype_may_be_infinite_with_the_right_sign() -> None:
    left = torch.full((1, 4), 200.0, dtype=torch.float16)
    right = torch.full((4, 1), 200.0, dtype=torch.float16)
    infinite = torch.full((1, 1), torch.inf, dtype=torch.float16)
    assert num_wrong(infinite, reference(left, right)) == 0
    assert num_wrong(-infinite, reference(left, right)) == 1
    assert num_wrong(torch.zeros(1, 1, dtype=torch.float16), reference(left, right)) == 1


def test_what_overflows_on_the_way_to_a_result_may_not_be_finite() -> None:
    left, right = torch.full((1, 4), 200.0), torch.full((4, 1), 100.0)
    infinite = torch.full((1, 1), torch.inf, dtype=torch.float16)
    scaled = reference(left, right, 0.5).scaled_last(0.5)  # 40,000, and 80,000 before
    assert num_wrong(infinite, scaled) == 0
    assert num_wrong(infinite, reference(left, right, 0.5)) == 1
    large = reference(left, right, 0.9)
    cancelled = large.plus(reference(left, -right, 0.9)).again()
    assert num_wrong(infinite * 0, cancelled) == 0
    beside_nan = torch.cat([left * torch.nan, left, left / 2])
    out = torch.full((3, 1), torch.inf, dtype=torch.float16)
    assert num_wrong(out, reference(beside_nan, right, 0.5).scaled_last(0.5)) == 1


def test_a_projection_sees_nan_in_rows_that_cannot_overflow() -> None:
    left, right = (x.half() for x in operands((3, 8, 5), torch.float32, 1))
    out = left @ right
    out[1, 2] = torch.nan
    assert num_wrong_rows(out, project(left, right, 1.0, 0)) == 1
    assert num_wrong_rows(out, project(left * 8000, right, 1.0, 0)) == 2


def test_a_row_that_is_not_finite_says_nothing_of_others() -> None:
    left, right = torch.randn(3, 8), torch.randn(8, 5)
    left[0, 3] = torch.inf
    out = left @ right
    assert num_wrong_rows(out, project(left, right, 1.0, 0)) == 0
    out[1, 2] += 1
    assert num_wrong_rows(out, project(left, right, 1.0, 0)) == 1


def test_a_reference_that_is_not_finite_bounds_nothing() -> None:
    nan = torch.full((2, 2), torch.nan)
    assert num_wrong(torch.zeros(2, 2), Reference(nan, nan, nan)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0])
def test_a_product_whose_transform_is_undone_is_within_the_bounds(
    dtype: torch.dtype, size: float
) -> None:
    """Below fp16's normal numbers each of the 32 elements of a block loses a part of its own."""
    copy = replace(resolve("mxfp4"), hadamard=Hadamard.DETERMINISTIC, hadamard_block=32, left=False)
    for seed in range(20):
        left, right = operands((16, 64, 64), dtype, seed)
        left = (left * size).to(dtype)
        out = hadamard(torch.matmul(left, right), block=32, left=False, inverse=True).to(dtype)
        expected = turned_back(reference(left, right), torch.arange(64), copy, dtype)
        assert num_wrong(out, expected) == 0
        wrong = out.clone()
        wrong[3] *= -1
        assert num_wrong(wrong, expected) > 0 or size < 1e-4

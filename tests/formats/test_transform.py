"""The Hadamard transform: exact on whole numbers, bit-exact on all others, and it cancels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quantexp.extras.verify.draws import butterflies, factor, random_integers, sylvester
from quantexp.formats import hadamard, quantise, random_signs

from .tensors import as_numpy, assert_same, sqnr_db
from .test_quantising import views

BLOCKS = [2, 4, 8, 16, 32, 64, 128]
all_blocks = pytest.mark.parametrize("block", BLOCKS)
CPU = torch.device("cpu")


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(1)).float()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


@all_blocks
@pytest.mark.parametrize("left", [True, False])
def test_whole_numbers_are_multiplied_with_sylvesters_matrix(block: int, left: bool) -> None:
    x = whole_numbers(5, 3 * block)
    expected = x.view(5, 3, block).double().numpy() @ sylvester(block) * factor(block, left=left)
    assert_same(hadamard(x, block=block, left=left), expected.reshape(5, -1))


@all_blocks
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_is_that_of_the_stated_order_of_additions(
    block: int, left: bool, dtype: torch.dtype
) -> None:
    x = (normal(6, block) * normal(6, 1).exp()).to(dtype)
    expected = np.stack([butterflies(row, left=left) for row in as_numpy(x)])
    y = hadamard(x, block=block, left=left)
    assert y.dtype == torch.float32
    assert_same(y, expected)


@all_blocks
def test_a_product_of_two_transformed_tensors_is_that_of_the_tensors(block: int) -> None:
    x, w = whole_numbers(7, 2 * block), whole_numbers(9, 2 * block)
    signs = random_signs(block, 3, 4, CPU)
    for chosen in (None, signs):
        left = hadamard(x, block=block, left=True, signs=chosen)
        right = hadamard(w, block=block, left=False, signs=chosen)
        assert torch.equal(left.double() @ right.double().t(), x.double() @ w.double().t())


@pytest.mark.parametrize("extent", [1, 2, 3, 13, 31, 32, 40, 72, 95])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_short_last_block_is_cut_into_powers_of_two(extent: int, axis: int) -> None:
    shape = [2, 3, 4]
    shape[axis] = extent
    x = whole_numbers(*shape)
    lines = x.movedim(axis, -1).double().numpy()
    parts, rest, size, start = [], extent, 32, 0
    while rest:
        while rest >= size:
            part = lines[..., start : start + size] @ sylvester(size)
            parts.append(part * factor(size, left=True))
            start, rest = start + size, rest - size
        size //= 2
    expected = torch.from_numpy(np.concatenate(parts, axis=-1)).movedim(-1, axis)
    assert_same(hadamard(x, axis=axis), expected.float())


@all_blocks
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("extent", [96, 77])
def test_the_inverse_undoes_it(block: int, left: bool, extent: int) -> None:
    x = whole_numbers(extent, 3)
    signs = random_signs(block, 5, 6, CPU)
    y = hadamard(x, axis=0, block=block, signs=signs, left=left)
    undone = hadamard(y, axis=0, block=block, signs=signs, left=left, inverse=True)
    assert torch.equal(undone, x)


def test_even_powers_of_two_are_orthonormal() -> None:
    for block in (4, 16, 64):
        H = hadamard(torch.eye(block), block=block)
        assert torch.equal(H @ H.t(), torch.eye(block))


def test_signs_come_from_seed_and_offset_and_are_alike_in_every_block() -> None:
    signs = random_signs(64, 2**40, 9, CPU)
    numbers = random_integers(64, 2**40, 9)
    assert signs.tolist() == [1.0 if number < 2**23 else -1.0 for number in numbers]
    x = whole_numbers(3, 160)
    repeated = torch.cat([signs, signs, signs[:32]])
    assert_same(hadamard(x, block=64, signs=signs), hadamard(x * repeated, block=64))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_strides_do_not_matter_and_the_input_is_left_alone(axis: int) -> None:
    for v in views(normal(6, 8, 64)).values():
        before = v.clone()
        assert_same(hadamard(v, axis=axis, block=4), hadamard(v.contiguous(), axis=axis, block=4))
        assert torch.equal(v, before)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,)])
def test_scalars_and_empty_tensors_come_back(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 1.5)
    assert_same(hadamard(x), x)


def test_an_outlier_is_spread_over_its_block_and_costs_mxfp4_less() -> None:
    """Without the transform, one value of 20 makes the smallest step 2 for all others."""
    x = normal(512, 32)
    x[:, 5] = 20
    back = hadamard(quantise(hadamard(x), "mxfp4"), inverse=True)
    rest = torch.arange(32) != 5
    plain = sqnr_db(x[:, rest], quantise(x, "mxfp4")[:, rest])
    assert sqnr_db(x[:, rest], back[:, rest]) > plain + 2


def test_nan_fills_its_block() -> None:
    x = torch.ones(64)
    x[40] = math.nan
    assert hadamard(x).isnan().tolist() == [False] * 32 + [True] * 32


@pytest.mark.parametrize("block", [0, 1, 3, 24, -4, 2.0, True])
def test_a_block_is_a_power_of_two(block: Any) -> None:
    with pytest.raises(
        ValueError, match=f"a Hadamard block must be a power of two of at least 2, got {block}"
    ):
        hadamard(torch.ones(4), block=block)


def test_signs_are_one_for_each_element_of_a_block() -> None:
    with pytest.raises(
        ValueError, match=r"signs must have one entry for each of a block's 4, got shape \(8,\)"
    ):
        hadamard(torch.ones(8), block=4, signs=torch.ones(8))


def test_dtype_and_axis_are_checked_as_by_quantise() -> None:
    with pytest.raises(TypeError, match=r"cannot quantise torch\.int32"):
        hadamard(torch.ones(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"axis must lie in \[-1, 0\], got 1"):
        hadamard(torch.ones(4), axis=1)

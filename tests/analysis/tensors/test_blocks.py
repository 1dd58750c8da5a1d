from __future__ import annotations

import pytest
import torch

from quantexp.analysis.tensors.blocks import keeps_blocks, spread_blocks

#: [tokens, sequences, width], each element its own place.
X = torch.arange(128 * 2 * 96, dtype=torch.float32).reshape(128, 2, 96)
STRIDES = {0: 192, 1: 96, 2: 1, -1: 1}


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_blocks_are_whole_and_aligned(dim: int) -> None:
    blocks, along = spread_blocks(X, dim, 32, 1024)
    assert (blocks.shape, along) == ((32, 32), -1)
    assert (blocks.diff(dim=-1) == STRIDES[dim]).all()
    place = blocks[:, 0] // STRIDES[dim] % X.shape[dim]
    assert (place % 32 == 0).all()


def test_a_block_along_tokens_stays_within_one_sequence() -> None:
    blocks, _ = spread_blocks(X, 0, 32, 4096)
    sequence = blocks // 96 % 2
    assert (sequence == sequence[:, :1]).all()
    assert set(sequence.flatten().tolist()) == {0.0, 1.0}


def test_blocks_come_from_everywhere() -> None:
    """One from each of equal strata: 96 of the 4 x 192 blocks along tokens meet most channels."""
    blocks, _ = spread_blocks(X, 0, 32, 96 * 32)
    channels = (blocks[:, 0] % 96).unique()
    assert len(channels) > 50
    assert len(blocks[:, 0].unique()) == 96


@pytest.mark.parametrize("num_elements", [0, X.numel(), 10 * X.numel()])
def test_a_small_tensor_is_returned_unchanged(num_elements: int) -> None:
    blocks, dim = spread_blocks(X, 1, 32, num_elements)
    assert blocks is X
    assert dim == 1


def test_an_axis_shorter_than_a_block_is_one_block() -> None:
    blocks, _ = spread_blocks(torch.arange(1000.0).reshape(100, 10), -1, 32, 100)
    assert blocks.shape == (10, 10)
    assert (blocks[:, 0] % 10 == 0).all()


def test_the_same_tensor_gives_the_same_blocks() -> None:
    first, second = (spread_blocks(X, 0, 32, 640)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("sample", "dim", "whole"),
    [
        (None, 0, True),
        ({"axis": 0, "indices": [0, 3, 77], "shape": [128, 96]}, 0, False),
        ({"axis": 0, "indices": [0, 3, 77], "shape": [128, 96]}, -1, True),
        ({"axis": 0, "indices": [*range(32, 64), *range(96, 128)], "shape": [128, 96]}, 0, True),
        ({"axis": 0, "indices": [*range(32), *range(96, 100)], "shape": [100, 96]}, -2, True),
        ({"axis": 0, "indices": [*range(16, 48)], "shape": [128, 96]}, 0, False),
        ({"axis": 2, "indices": [1], "shape": [64, 2, 4, 32]}, 0, True),
    ],
)
def test_a_sample_keeps_blocks_whose_elements_it_has(
    sample: dict[str, object] | None, dim: int, whole: bool
) -> None:
    assert keeps_blocks({"sample": sample}, dim, 32) is whole

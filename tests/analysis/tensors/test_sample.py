from __future__ import annotations

import pytest
import torch

from quantexp.analysis.tensors.sample import (
    evenly_spread,
    keeps_blocks,
    sample_blocks,
    spread_blocks,
)


def test_a_small_tensor_is_its_own_sample() -> None:
    x = torch.randn(4, 8)
    assert sample_blocks(x, 0, 32) == (x, 0)


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_sample_along_the_last_axis_has_whole_rows(dim: int) -> None:
    x = torch.arange(64 * 4 * 96).view(64, 4, 96)
    part, sampled_dim = sample_blocks(x, dim, 32, limit=960)
    assert part.shape == (10, 96)
    assert sampled_dim == -1
    assert bool((part[:, 1:] - part[:, :-1] == 1).all())
    assert bool((part[:, 0] % 96 == 0).all())


@pytest.mark.parametrize("shape", [(256, 3, 400), (256, 2000), (4, 256, 64)])
def test_a_sample_along_another_axis_has_aligned_blocks(shape: tuple[int, ...]) -> None:
    dim = shape.index(256)
    x = torch.arange(256).view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
    part, sampled_dim = sample_blocks(x, dim, 32, limit=40_000)
    assert sampled_dim == 1
    assert part.shape[1] == 32
    assert part.numel() <= 40_000
    assert bool((part[:, 0] % 32 == 0).all())
    assert bool((part[:, 1:] - part[:, :-1] == 1).all())


def test_strips_reach_the_whole_width() -> None:
    x = torch.arange(3000).expand(64, 3000)
    part, _ = sample_blocks(x, 0, 32, limit=160_000)
    assert part.min() == 0
    assert part.max() == 2999


def test_an_axis_shorter_than_a_block_is_sampled_whole() -> None:
    x = torch.randn(100, 8, 50)
    part, dim = sample_blocks(x, 1, 32, limit=4000)
    assert (part.shape, dim) == (torch.Size([10, 8, 50]), 1)


def test_a_row_longer_than_the_limit_is_cut_between_blocks() -> None:
    part, dim = sample_blocks(torch.arange(1000), 0, 32, limit=100)
    assert part.tolist() == [list(range(96))]
    assert dim == -1


def test_a_sample_has_at_least_one_block() -> None:
    part, _ = sample_blocks(torch.arange(1000), 0, 32, limit=10)
    assert part.shape == (1, 32)


@pytest.mark.parametrize(("count", "total"), [(1, 1), (7, 100), (128, 4096), (999, 1000)])
def test_indices_come_one_from_each_stratum(count: int, total: int) -> None:
    indices = evenly_spread(count, total)
    bounds = [i * total // count for i in range(count + 1)]
    strata = zip(bounds[:-1], indices.tolist(), bounds[1:], strict=True)
    assert all(low <= index < high for low, index, high in strata)


def test_a_count_above_the_total_gives_all() -> None:
    assert evenly_spread(9, 4).tolist() == [0, 1, 2, 3]


def test_every_head_is_sampled_about_equally_often() -> None:
    heads = evenly_spread(4096, 4096 * 32) % 32
    assert torch.bincount(heads, minlength=32).min() > 100


def test_the_same_tensor_gives_the_same_sample() -> None:
    x = torch.randn(512, 512)
    assert torch.equal(sample_blocks(x, 0, 32, 4096)[0], sample_blocks(x, 0, 32, 4096)[0])


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

from __future__ import annotations

import pytest
import torch

from quantexp.analysis.tensors.sample import evenly_spread, sample_blocks


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

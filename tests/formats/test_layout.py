"""Chunks cover a tensor once, and contain whole blocks."""

from __future__ import annotations

import pytest
import torch

from quantexp.formats.layout import Scratch, chunks, inverse, memory_order


@pytest.mark.parametrize("extents", [(1, 1, 1), (3, 70, 1), (2, 64, 5), (5, 7, 40), (1, 33, 9)])
@pytest.mark.parametrize("block", [1, 4, 32, 128])
@pytest.mark.parametrize("limit", [1, 40, 256, 10**6])
def test_chunks_cover_every_element_once_and_every_block_once(
    extents: tuple[int, int, int], block: int, limit: int
) -> None:
    o, n, i = extents
    counts = torch.zeros(extents, dtype=torch.int32)
    blocks = torch.zeros(o, -(-n // block), i, dtype=torch.int32)
    for chunk in chunks(extents, block, limit):
        part = chunk.elements(counts)
        part += 1
        scales = chunk.scales(blocks)
        scales += 1
        assert part.shape[2] == chunk.k
        assert part.shape[:2] + part.shape[3:] == scales.shape[:2] + scales.shape[3:]
        assert part.numel() <= max(limit, chunk.k)
    assert (counts == 1).all()
    assert (blocks == 1).all()


@pytest.mark.parametrize("extents", [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_an_empty_tensor_has_no_chunks(extents: tuple[int, int, int]) -> None:
    assert list(chunks(extents, 32, 100)) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_memory_order_finds_the_permutation_that_makes_a_tensor_contiguous(
    order: tuple[int, ...],
) -> None:
    x = torch.zeros(2, 3, 4).permute(order)
    assert x.permute(memory_order(x)).is_contiguous()
    assert x.permute(memory_order(x)).permute(inverse(memory_order(x))).shape == x.shape


def test_scratch_gives_the_same_memory_in_every_shape() -> None:
    scratch = Scratch(24, torch.device("cpu"))
    first, again = scratch.of_shape((4, 6)), scratch.of_shape((2, 3, 2))
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in again]
    assert len({t.data_ptr() for t in first}) == 3

"""The order of a sequence on several ranks, by hand and for any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantexp.quant.attention.context_parallel import SequenceShare, chunks_of
from tests.fake_gpu import copies

CPU = torch.device("cpu")


def share(rank: int, parts: list[Tensor]) -> SequenceShare:
    """A rank that receives these parts; the sum adds 1000 for the other ranks."""
    return SequenceShare(rank, len(parts), lambda _: parts, lambda x: x + 1000)


def test_chunks_of_two_ranks_are_the_outer_and_the_inner_ones() -> None:
    assert [chunks_of(rank, 2) for rank in (0, 1)] == [(0, 3), (1, 2)]


def test_positions_are_those_of_the_chunks() -> None:
    assert share(0, [torch.zeros(4)] * 2).positions(4, CPU).tolist() == [0, 1, 6, 7]
    assert share(1, [torch.zeros(4)] * 2).positions(4, CPU).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gathered_tokens_lie_in_the_order_of_the_sequence(num_ranks: int) -> None:
    whole = torch.arange(12 * num_ranks).view(-1, 1, 2)
    none = [torch.zeros(0)] * num_ranks
    parts = [share(rank, none).own_rows(whole) for rank in range(num_ranks)]
    for rank, own in enumerate(parts):
        one = share(rank, parts)
        assert torch.equal(own, whole[one.positions(len(own), CPU)])
        assert torch.equal(one.gathered(own), whole)
        assert torch.equal(one.own_sum(whole), own + 1000)


def test_rows_of_a_mask_are_those_of_the_own_queries() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    one = share(1, [torch.zeros(4)] * 2)
    expected = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]).bool()
    assert torch.equal(one.own_rows(mask[None, None], 2)[0, 0, :2], expected)
    assert torch.equal(one.own_rows(mask), one.hidden(4, slice(4), mask.device))
    assert torch.equal(one.own_rows(mask)[2:3], one.hidden(4, slice(2, 3), mask.device))


def test_on_a_gpu_a_mask_waits_for_nothing() -> None:
    one = SequenceShare(1, 2, lambda x: [x, x], lambda x: x)
    assert copies(lambda device: one.hidden(8, slice(2, 6), device)) == []

"""Collectives of tensors with unlike extents, against the concatenation and the sum that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.training.megatron.uneven import gathering_unlike, padded, scattering_unlike


def only_alike(tensors: list[Tensor], *others: Tensor) -> None:
    """Refuse what gloo refuses."""
    if len({tuple(each.shape) for each in (*tensors, *others)}) > 1:
        raise RuntimeError("invalid tensor size")


@pytest.mark.parametrize("lengths", [(3, 5), (0, 2), (4, 4)])
def test_unlike_tensors_are_gathered_whole(lengths: tuple[int, int]) -> None:
    own = [torch.randn(n, 2) for n in lengths]
    longest = max(lengths)

    def gloo(tensors: list[Tensor], x: Tensor, *_: Any) -> None:
        only_alike(tensors, x)
        for target, source in zip(tensors, own, strict=True):
            target.copy_(padded(source, longest))

    for mine in own:
        targets = [torch.full((n, 2), torch.nan) for n in lengths]
        gathering_unlike(gloo)(targets, mine)
        assert all(map(torch.equal, targets, own))


@pytest.mark.parametrize("lengths", [(3, 5), (0, 2), (4, 4)])
def test_unlike_tensors_are_reduced_and_scattered(lengths: tuple[int, int]) -> None:
    inputs = [[torch.randn(n, 2) for n in lengths] for _ in range(2)]
    longest = max(lengths)
    for rank, n in enumerate(lengths):

        def gloo(output: Tensor, mine: list[Tensor], *_: Any, rank: int = rank) -> None:
            only_alike(mine, output)
            output.copy_(torch.stack([padded(each[rank], longest) for each in inputs]).sum(0))

        output = torch.full((n, 2), torch.nan)
        scattering_unlike(gloo)(output, inputs[rank])
        assert torch.equal(output, inputs[0][rank] + inputs[1][rank])

"""Attention where several ranks share each sequence (context parallelism): every rank has its queries and all keys.

    q, P, dS, dO   rows of the rank's own queries
    k, v           gathered after the rotary embedding and before quantisation: their blocks and scales are those of
                   the whole sequence
    dk, dv         of all keys, from the rank's own queries; summed over ranks in float32, then rounded once

A sequence is cut into 2 N chunks for N ranks. Rank r holds chunks r and 2 N - 1 - r, in this order (zigzag, as in
Megatron), so that all ranks have as much of the causal mask. Blocks along queries lie in this order: they are the
blocks of one process where T / (2 N) is a multiple of the block.

    # T tokens of the whole sequence; own: T / N of them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceShare:
    """A rank's part of each sequence, and how it communicates with the ranks that have the others."""

    rank: int
    num_ranks: int
    #: Equal shapes of all ranks, by rank.
    all_gather: Callable[[Tensor], Sequence[Tensor]]
    #: The sum over all ranks; may overwrite its argument.
    all_reduce: Callable[[Tensor], Tensor]

    def positions(self, num_own: int, device: torch.device) -> Tensor:
        """The position in the sequence of each own token, int64 [own]; `num_own` must be even."""
        half = num_own // 2
        starts = [chunk * half for chunk in chunks_of(self.rank, self.num_ranks)]
        return torch.cat([torch.arange(start, start + half, device=device) for start in starts])

    def gathered(self, own: Tensor) -> Tensor:
        """The tokens of all ranks, [T, ...] from [own, ...], in the order of the sequence."""
        parts = self.all_gather(own.contiguous())
        by_chunk: list[Tensor] = [own] * (2 * self.num_ranks)
        for rank, part in enumerate(parts):
            for chunk, tokens in zip(chunks_of(rank, self.num_ranks), part.chunk(2), strict=True):
                by_chunk[chunk] = tokens
        return torch.cat(by_chunk)

    def own_rows(self, whole: Tensor, dim: int = 0) -> Tensor:
        """The rows of the own tokens along the dimension of all tokens."""
        chunks = whole.chunk(2 * self.num_ranks, dim)
        return torch.cat([chunks[chunk] for chunk in chunks_of(self.rank, self.num_ranks)], dim)

    def own_sum(self, whole: Tensor) -> Tensor:
        """The rows of the own tokens in the sum over all ranks, [own, ...] from [T, ...]."""
        return self.own_rows(self.all_reduce(whole.contiguous()))

    def hidden(self, num_own: int, rows: slice, device: torch.device) -> Tensor:
        """True where one of these own queries must not see a key under the causal mask, [rows, T]."""
        queries = self.positions(num_own, device)[rows]
        return torch.arange(num_own * self.num_ranks, device=device) > queries[:, None]


def chunks_of(rank: int, num_ranks: int) -> tuple[int, int]:
    """The chunks of a sequence that a rank holds, of 2 `num_ranks`, in the order in which it holds them."""
    return rank, 2 * num_ranks - 1 - rank

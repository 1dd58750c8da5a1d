"""The tokens of a micro-batch that belong to a rank under context parallelism.

A sequence is cut into 2 N chunks for N ranks; rank r holds chunks r and 2 N - 1 - r, so that all ranks have as much of
the causal mask. Attention masks stay whole: the core attention takes the rows of its queries.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor

#: What has a value for each token, along its last axis.
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids", "documents")


def own_tokens(batch: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """The micro-batch with this rank's tokens; T must be a multiple of 2 `num_ranks`."""
    if num_ranks == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    return {
        key: zigzag(value, rank, num_ranks) if key in _BY_TOKEN else value
        for key, value in batch.items()
    }


def zigzag(x: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's two chunks of x along the last axis, in order."""
    chunks = x.chunk(2 * num_ranks, dim=-1)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]], dim=-1)

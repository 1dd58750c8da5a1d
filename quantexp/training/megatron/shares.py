"""How the ranks of a run share the modules that the proof watches: linear layers, sequences, and this rank's place."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from quantexp.proof.border import SequenceShares, Shares
from quantexp.proof.places import Ranks, from_both_ends


def ranks_of(config: Any) -> Ranks:
    """This rank's place among those that share its modules."""
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    tensor, context, expert_tensor = ((group.rank(), group.size()) for group in groups)
    heads = config.num_attention_heads // tensor[1]
    return Ranks(tensor, context, expert_tensor, heads, config.num_query_groups)


def is_emulated(module: Any) -> bool:
    """Whether a layer of Transformer Engine multiplies with torch, in the scheme's own formats."""
    return hasattr(module, "fp8_meta") and hasattr(module, "_own")


def shares_of(module: Any) -> Shares:
    """How a layer's tensors are divided, as Megatron-Core's two classes of parallel layers do it."""
    group = parallel_state.get_tensor_model_parallel_group()
    is_row = isinstance(module, RowParallelLinear)
    if is_emulated(module):
        size, is_row, sums_dx = group.size(), module.parallel_mode == "row", True
    else:
        group = module.tp_group
        size = 1 if group is None or module.explicit_expert_comm else group.size()
        sums_dx = bool(module.sequence_parallel or getattr(module, "allreduce_dgrad", False))
    if size == 1:
        return Shares()
    divides, sums_dx = bool(module.sequence_parallel), sums_dx and not is_row

    def gather_tokens(x: Tensor) -> Tensor:
        whole = x.new_empty(size * x.shape[0], *x.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    def add(x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x, group=group)
        return x

    return Shares(
        group.rank(),
        size,
        sums_y=is_row,
        sums_dx=sums_dx,
        divides_tokens=divides,
        gather=gather_tokens,
        add=add,
    )


def sequence_shares() -> SequenceShares:
    """How the ranks of context parallelism divide sequences, in Megatron's zigzag order."""
    group = parallel_state.get_context_parallel_group()
    size, rank = group.size(), group.rank()
    if size == 1:
        return SequenceShares()

    def positions(rank: int, num_own: int) -> Tensor:
        parts = from_both_ends(num_own, (rank, size))
        return torch.cat([torch.arange(start, start + length) for _, length, start in parts])

    def gather_tokens(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        order = torch.cat([positions(each, x.shape[0]) for each in range(size)])
        return torch.cat(parts)[order.argsort().to(x.device)]

    def add(x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x, group=group)
        return x

    return SequenceShares(size, gather_tokens, add, lambda num_own: positions(rank, num_own))

"""Collectives between the ranks of a run, apart from Megatron's own communication; inside `session`.

Every rank calls each function at the same point. If a rank is missing, the call raises after the session's timeout, or
at once if the connection is closed; `is_lost_peer` recognises these errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor

from quantexp.model.decoder import is_routed
from quantexp.quant.precision import ModuleId

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The values of all ranks, ordered by rank."""
    values: list[T] = [value] * torch.distributed.get_world_size()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on at least one rank."""
    return bool(largest(int(flag)))


def largest(number: int) -> int:
    """The largest number of all ranks, within 32 bits."""
    if torch.distributed.get_world_size() == 1:
        return number
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(number, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    return int(numbers)


def sum_over_stages(x: Tensor) -> Tensor:
    """The sum of a tensor over the stages of a pipeline and the ranks that share each sequence.

    Ranks of a tensor-parallel group have the same value, which counts once.
    """
    for group in (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
    ):
        if group.size() > 1:
            torch.distributed.all_reduce(x, group=group)
    return x


def sum_over_model_parallel(x: Tensor) -> Tensor:
    """The sum of a tensor over all ranks that together compute one micro-batch."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(x, group=group)
    return sum_over_stages(x)


def mean_over_data_parallel(x: Tensor) -> Tensor:
    """The mean of a tensor over the ranks that share the global batch."""
    size = parallel_state.get_data_parallel_world_size()
    if size > 1:
        torch.distributed.all_reduce(x, group=parallel_state.get_data_parallel_group())
    mean: Tensor = x / size
    return mean


def reduce_amax(module: ModuleId, amax: Tensor) -> Tensor:
    """The maximum of an amax over the ranks that hold parts of a module's tensors."""
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if is_routed(module.name)
        else parallel_state.get_tensor_and_context_parallel_group()
    )
    if group.size() == 1:
        return amax
    whole = amax.detach().clone()
    torch.distributed.all_reduce(whole, op=torch.distributed.ReduceOp.MAX, group=group)
    return whole


def merge_amaxes(amaxes: dict[str, float]) -> dict[str, float]:
    """The largest amax of each stream over all ranks; every rank calls this."""
    merged: dict[str, float] = {}
    for of_rank in gather(amaxes):
        for stream, amax in of_rank.items():
            merged[stream] = max(amax, merged.get(stream, amax))
    return merged


def complete_gradients(models: Iterable[Any]) -> None:
    """Give every rank all sums of the gradients, of which a distributed optimizer leaves it its own share.

    Every rank calls this, after the reduction; the buffers hold whole gradients anyway.
    """
    for model in models:
        for buckets in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:
                whole = bucket.grad_data
                share = whole.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(whole, share, group=group)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error means that another rank did not respond, so that this rank is not the cause."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )

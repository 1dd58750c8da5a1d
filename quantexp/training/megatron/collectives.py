"""What the ranks of a run tell one another, apart from Megatron's own communication; inside `session`.

Every function is called by every rank at the same point. Where a rank is missing they raise once the session's time is
over, or at once where its connection is gone: `lost_peer` recognises that.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    values: list[T] = [value] * torch.distributed.get_world_size()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def mean_over_data_parallel(x: Tensor) -> Tensor:
    """The mean of a tensor over the ranks that share the global batch."""
    size = parallel_state.get_data_parallel_world_size()
    if size > 1:
        torch.distributed.all_reduce(x, group=parallel_state.get_data_parallel_group())
    mean: Tensor = x / size
    return mean


def lost_peer(error: BaseException) -> bool:
    """Whether an error says only that another rank did not answer, which is not this rank's fault."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )

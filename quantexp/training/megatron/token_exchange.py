"""What a linear layer exchanges with the ranks that share it.

column layers   tokens are gathered before the product (sequence parallelism); the gradient of the input, a sum over
                the ranks, is reduced: whole, or each rank's share of the tokens
row layers      Megatron reduces their outputs outside

# T tokens of a rank, N ranks, B sequences, I input width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """The communication of one layer; the default is none."""

    group: Any = None
    #: Whether each rank holds its share of the tokens outside the product.
    divides_tokens: bool = False

    @property
    def reduces(self) -> bool:
        """Whether the gradient of the input is a sum over ranks."""
        return self.group is not None

    def start_gather(self, x_TBI: Tensor) -> Pending:
        """The tokens of all ranks, [N T, B, I]; the input itself if tokens are not divided."""
        if not self.divides_tokens:
            return Pending(x_TBI)
        whole = x_TBI.new_empty(self._size * x_TBI.shape[0], *x_TBI.shape[1:])
        work = torch.distributed.all_gather_into_tensor(
            whole, x_TBI.contiguous(), group=self.group, async_op=True
        )
        return Pending(whole, work)

    def start_reduce(self, dx_TBI: Tensor) -> Pending:
        """The sum over the ranks of the input's gradient: whole, or this rank's share of the tokens."""
        if not self.reduces:
            return Pending(dx_TBI)
        dx_TBI = dx_TBI.contiguous()
        if not self.divides_tokens:
            return Pending(
                dx_TBI, torch.distributed.all_reduce(dx_TBI, group=self.group, async_op=True)
            )
        share = dx_TBI.new_empty(dx_TBI.shape[0] // self._size, *dx_TBI.shape[1:])
        work = torch.distributed.reduce_scatter_tensor(
            share, dx_TBI, group=self.group, async_op=True
        )
        return Pending(share, work)

    @property
    def _size(self) -> int:
        return int(torch.distributed.get_world_size(self.group))


NO_EXCHANGE = Exchange()


@dataclass(frozen=True)
class Pending:
    """The result of a collective that may still run."""

    result: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """The result, complete."""
        if self.work is not None:
            self.work.wait()
        return self.result

"""The result for one operand, and the statuses that a slot can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from quantexp.formats.layout import in_memory_order, memory_order


class Status(Enum):
    """The result for one slot."""

    ENGAGED = "engaged"
    INCONCLUSIVE = "inconclusive"
    MISMATCH = "mismatch"
    NOT_REACHED = "not_reached"


@dataclass(frozen=True)
class Finding:
    """The result for one operand in one call."""

    status: Status
    #: The reason; of `engaged` only what was not compared.
    reason: str = ""
    #: Whether the operand is not its source.
    quantised: bool = False


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, float32; NaN if there is NaN. `torch.linalg.vector_norm` takes 20 times as long.

    So does `torch.aminmax` of a transposed tensor.
    """
    low, high = torch.aminmax(in_memory_order(x, memory_order(x)))
    return torch.maximum(high, -low).to(torch.float32)

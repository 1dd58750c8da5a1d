"""The result for one operand or product, and the statuses that a slot can have."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from quantexp.formats.layout import in_memory_order, memory_order
from quantexp.proof.contrast import Contrasts


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


@dataclass
class ProductChecks:
    """The comparisons of what left a module with one product of the expected operands."""

    #: Elements that were compared, and rows whose projections were.
    elements: int = 0
    rows: int = 0
    #: What was wrong the first time.
    wrong: str = ""
    #: How much of its alternatives is in it, in forward passes that were recomputed and in others.
    contrasts: dict[bool, Contrasts] = field(default_factory=dict)

    def words(self) -> str:
        """What was wrong; empty if nothing was."""
        named = (each.words() for each in self.contrasts.values() if not self.wrong)
        return self.wrong or next(filter(None, named), "")


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, float32; NaN if there is NaN. `torch.linalg.vector_norm` takes 20 times as long.

    So does `torch.aminmax` of a transposed tensor.
    """
    low, high = torch.aminmax(in_memory_order(x, memory_order(x)))
    return torch.maximum(high, -low).to(torch.float32)

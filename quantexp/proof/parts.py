"""A product that takes several calls, each of which multiplies a part of an operand.

One scale of a whole tensor follows from no part of it, so the code that multiplies says the tensor's amax with every
part. It is not believed: the parts show what they were made from, and the largest of these must be what was said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.proof.judge import Finding, Status


@dataclass
class Parts:
    """What the parts of one operand have shown so far."""

    quantised: bool = False
    #: Whether the last part is still to come.
    is_open: bool = False
    #: The largest amax of what they were made from, 0-dim float32.
    amax: Tensor | None = None

    def see(self, amax: Tensor) -> None:
        """Take the amax of a part into account."""
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def held_against(self, told: Tensor) -> Finding | None:
        """After the last part: a mismatch if the amax that was told is not that of all parts."""
        assert self.amax is not None
        if torch.equal(self.amax, told.to(self.amax)):
            return None
        return Finding(
            Status.MISMATCH,
            f"its scale is that of an amax of {float(told):.4g}, and its parts have one of {float(self.amax):.4g}",
            quantised=True,
        )


#: Of a product whose last part never came, so that nothing was held against what was told.
CUT_SHORT = Finding(Status.MISMATCH, "the last part of its product was never multiplied")


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand in the working precision, if it lost nothing when it was widened from that; else as it is."""
    narrow = x.to(dtype)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x

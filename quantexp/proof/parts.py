"""A product that takes several calls, each of which multiplies a part of an operand.

A scale of the whole tensor follows from no single part, so the code that multiplies states the tensor's amax with every
part. That statement is verified: the parts show their sources, and the largest amax of these must equal the stated one.
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
    #: Whether more parts are to come.
    is_open: bool = False
    #: The largest amax of the parts' sources, 0-dim float32.
    amax: Tensor | None = None

    def observe(self, amax: Tensor) -> None:
        """Include the amax of a part."""
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def mismatch(self, stated: Tensor) -> Finding | None:
        """After the last part: a mismatch if the stated amax is not that of all parts."""
        assert self.amax is not None
        if torch.equal(self.amax, stated.to(self.amax)):
            return None
        return Finding(
            Status.MISMATCH,
            f"its scale is that of an amax of {float(stated):.4g}, and its parts have one of {float(self.amax):.4g}",
            quantised=True,
        )


#: The result for a product whose last part never ran, so that the stated amax could not be verified.
CUT_SHORT = Finding(Status.MISMATCH, "the last part of its product was never multiplied")


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand in the working precision, if widening it from there was lossless; otherwise unchanged."""
    narrow = x.to(dtype)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x

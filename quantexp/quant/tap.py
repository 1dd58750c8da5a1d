"""Where tensors can be looked at: a function that a module calls with what passes through its products.

A module hands over (operation, phase, tensor name, tensor) for each tensor of the contract, before quantisation,
whether or not anybody looks; `nobody` is the tap of a module that nobody looks at, and costs a call.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

FORWARD, BACKWARD = "forward", "backward"
PRE, POST = "pre", "post"


class Tap(Protocol):
    """Called with every tensor that passes; must not change it."""

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        """Look at one tensor."""


def nobody(operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
    """The tap of a module that nobody looks at."""

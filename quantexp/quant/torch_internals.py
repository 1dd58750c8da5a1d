"""All that quantexp takes from `torch._C`."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import HashStore, TCPStore

__all__ = [
    "HashStore",
    "TCPStore",
    "current_autograd_node",
    "in_backward",
    "without_torch_function",
]

#: A context in which `__torch_function__` modes and subclasses are not called, for an operation that only we see.
without_torch_function = torch._C.DisableTorchFunction


def current_autograd_node() -> torch.autograd.graph.Node | None:
    """The node whose backward is running on this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether a backward is running on this thread; in a forward this means that it is recomputed."""
    return torch._C._current_autograd_node() is not None

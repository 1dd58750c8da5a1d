"""All that quantexp takes from `torch._C`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKeySet, _TorchDispatchModeKey
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "TCPStore",
    "current_autograd_node",
    "has_tracing_mode",
    "in_backward",
    "included_keys",
    "is_batch",
    "is_transformed",
    "key_mask",
    "keys_of",
    "under_transform",
    "unseen",
    "without_torch_function",
]

#: A context in which `__torch_function__` modes and subclasses are not called, for an operation that only we see.
without_torch_function = torch._C.DisableTorchFunction


class unseen:  # noqa: N801  (a context manager, and faster than a generator)
    """A context for a watcher's own operations: without derivatives, and seen by no mode and no subclass."""

    def __enter__(self) -> None:
        self._had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._guards = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._had_gradients)


def current_autograd_node() -> torch.autograd.graph.Node | None:
    """The node whose backward is running on this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether a backward is running on this thread; in a forward this means that it is recomputed."""
    return torch._C._current_autograd_node() is not None


def key_mask(*names: str) -> int:
    """The keys of torch's dispatcher with these names, as bits."""
    mask = 0
    for name in names:
        mask |= DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
    return mask


def keys_of(x: Tensor) -> int:
    """The keys by which the dispatcher chooses what an operation does with x, as bits."""
    return torch._C._dispatch_keys(x).raw_repr()


def included_keys() -> int:
    """The keys that this thread adds to those of every tensor, as bits."""
    return torch._C._dispatch_tls_local_include_set().raw_repr()


#: The modes of torch that trace, unlike those of a program, which may watch a call in any way.
_TRACING_MODES = (
    _TorchDispatchModeKey.FAKE,
    _TorchDispatchModeKey.PROXY,
    _TorchDispatchModeKey.FUNCTIONAL,
)


def has_tracing_mode() -> bool:
    """Whether a mode of torch's own records this thread's operations or computes shapes alone."""
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES)


def is_transformed(x: Tensor) -> bool:
    """Whether a transform of `torch.func` wraps x."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def under_transform(x: Tensor) -> Tensor:
    """The tensor that the outermost wrapper of x contains."""
    return torch._C._functorch.get_unwrapped(x)


def is_batch(x: Tensor) -> bool:
    """Whether the outermost wrapper of x is that of `torch.func.vmap`."""
    return torch._C._functorch.is_batchedtensor(x)

"""The module that a matrix product belongs to, determined without relying on the code that multiplies.

Forward: hooks keep a stack of the watched modules that are executing. Backward: when a watched module's forward pass
ends, the autograd nodes it created are tagged with its name, and the executing node identifies the module. A
recomputed forward pass runs inside the backward pass and is on the stack like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from quantexp.formats.torch_internals import current_autograd_node

_TAG = "quantexp.owner"


class Owners:
    """The watched modules by name; `current` is the innermost one that is executing."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._stack: list[str] = []

    def current(self) -> str | None:
        """The module whose forward or backward is running, or None outside all of them."""
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node()
        return None if node is None else _metadata(node).get(_TAG)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Track the modules inside this context."""
        handles = []
        try:
            for name, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(self._enter(name)))
                handles.append(
                    module.register_forward_hook(
                        self._leave(name), with_kwargs=True, always_call=True
                    )
                )
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append(name)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            self._stack.pop()
            inputs = _tensors([args, list(kwargs.values())])
            entered = {t.grad_fn for t in inputs if t.grad_fn is not None}
            for tensor in _tensors(output):
                _tag(tensor.grad_fn, entered, name)

        return hook


def _metadata(node: Node) -> dict[str, str]:
    """A node's own dictionary (a property that its type declares as a method)."""
    metadata: Any = node.metadata
    return cast("dict[str, str]", metadata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _tag(start: Node | None, entered: set[Node], name: str) -> None:
    """Tag every node between a module's output and its inputs that no inner module has tagged."""
    seen: set[Node] = set()
    todo = [start]
    while todo:
        node = todo.pop()
        if node is None or node in entered or node in seen:
            continue
        seen.add(node)
        _metadata(node).setdefault(_TAG, name)
        todo += [following for following, _ in node.next_functions]

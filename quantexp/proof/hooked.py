"""Hooks of the watcher's own on modules and gradients, and what stands in a module's forward in place of hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen, without_torch_function

#: Sees the arguments of a forward pass, and may replace them.
Enter = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]
]
#: Sees the output of a forward pass, after its arguments.
Leave = Callable[[nn.Module, tuple[Any, ...], Any], None]


class Hooked(ABC):
    """What sees modules by hooks of its own, while it is entered as a context."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._install()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.remove()

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    @abstractmethod
    def _install(self) -> None:
        """Register the hooks."""

    def finish(self) -> None:  # noqa: B027  (most have nothing left)
        """Compare what is left when all passes have ended."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop what the hooks have kept."""

    def _hook(self, handle: Any) -> None:
        self._handles.append(handle)


class InForward:
    """Stands in a module's forward until it is removed."""

    def __init__(self, module: nn.Module, enter: Enter, leave: Leave) -> None:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = enter(module, args, kwargs)
            output = forward(*args, **kwargs)
            leave(module, args, output)
            return output

        self._module, self._own = module, vars(module).get("forward")
        vars(module)["forward"] = run

    def remove(self) -> None:
        """Give the module its forward back."""
        del vars(self._module)["forward"]
        if self._own is not None:
            vars(self._module)["forward"] = self._own


def plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same hook of a module, without a call of the `__torch_function__` modes for each attribute of a tensor."""

    def run(*args: Any) -> Any:
        with without_torch_function():
            return hook(*args)

    return run


def unseen_hook(see: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook on a gradient, whose products no dispatch mode sees."""

    def hook(gradient: Tensor) -> None:
        with unseen():
            see(gradient.detach())

    return hook

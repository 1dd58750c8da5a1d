"""A GPU of torch's fake tensors: shows on any machine which operations would wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def on_fake_gpu(work: Callable[[torch.device], object]) -> list[str]:
    """The operations of `work` on a fake GPU, each by its name; those that copy between devices end in `!`.

    Such a copy of ordinary memory waits for all that the device still computes. A value that the host reads raises
    torch's DataDependentOutputException.
    """
    with FakeTensorMode(), _Indexing():
        watch = _Watch()
        with watch:
            work(torch.device("cuda", 0))
    return watch.operations


def copies(work: Callable[[torch.device], object]) -> list[str]:
    """Those of the operations that copy between devices."""
    return [name for name in on_fake_gpu(work) if name.endswith("!")]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in (*args, result) if isinstance(x, Tensor)}
        is_copy = len(devices) > 1 and func.overloadpacket.__name__ in ("_to_copy", "copy_")
        self.operations.append(f"{func}{'!' if is_copy else ''}")
        return result


class _Indexing(TorchFunctionMode):
    """Replaces Python's operators on tensors that need a real device by their functions."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__invert__:
            return torch.bitwise_not(*args)
        if func is Tensor.__getitem__:
            return _item(*args)
        if func is Tensor.__setitem__:
            return torch.ops.aten.copy_(_item(*args[:2]), args[2])
        return func(*args, **(kwargs or {}))


def _item(x: Tensor, index: Any) -> Tensor:
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        else:
            x = torch.ops.aten.index(x, [None] * dim + [part])
        dim += 1
    return x

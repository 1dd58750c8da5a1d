"""A GPU of torch's fake tensors: shows on any machine which operations would wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def on_fake_gpu(work: Callable[[torch.device], object]) -> list[str]:
    """The operations of `work` on a fake GPU, each by its name; those that copy between devices end in `!`.

    Such a copy of ordinary memory waits for all that the device still computes. A value that the host reads raises
    torch's DataDependentOutputException.
    """
    with FakeTensorMode():
        watch = _Watch()
        with watch:
            work(torch.device("cuda", 0))
    return watch.operations


def copies(work: Callable[[torch.device], object]) -> list[str]:
    """Those of the operations that copy between devices."""
    return [name for name in on_fake_gpu(work) if name.endswith("!")]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in (*args, result) if isinstance(x, Tensor)}
        is_copy = len(devices) > 1 and func.overloadpacket.__name__ in ("_to_copy", "copy_")
        self.operations.append(f"{func}{'!' if is_copy else ''}")
        return result

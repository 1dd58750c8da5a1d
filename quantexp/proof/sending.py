"""Finds gradients in what reaches torch.distributed's collectives, by a TorchDispatchMode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.model.finite import tensors_in

#: The operators of torch.distributed that send a tensor to be summed, by the beginning of their names.
_SENDING = ("allreduce", "reduce_scatter", "_reduce_scatter", "send")


class SendWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds gradients in the tensors that reach torch.distributed's collectives.

    Args:
        expected: by name, a tensor whose memory must lie in one of the tensors that are sent.
        sent: is called with the name when it is, before the tensor is sent.
    """

    def __init__(self, expected: Mapping[str, Tensor], sent: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected, self._sent = dict(expected), sent

    @property
    def left(self) -> list[str]:
        """The names that no collective has sent yet."""
        return list(self._expected)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__.startswith(_SENDING):
            for _, tensor in tensors_in(args):
                for name in [name for name, x in self._expected.items() if _lies_in(x, tensor)]:
                    del self._expected[name]
                    self._sent(name)
        return func(*args, **(kwargs or {}))


def _lies_in(x: Tensor, sent: Tensor) -> bool:
    """Whether a contiguous tensor's memory lies within another's."""
    if x.device != sent.device:
        return False
    start, size = sent.data_ptr(), sent.numel() * sent.element_size()
    return start <= x.data_ptr() and x.data_ptr() + x.numel() * x.element_size() <= start + size

"""Statistics that are counted later, while training goes on: the tensor is held meanwhile, not copied.

Held tensors are counted many in a call, during which Python goes on. Whoever holds one sees to it that it is counted
before somebody changes it (a weight, before the optimizer steps). Where autograd's version counter says that it was
changed all the same, there are no statistics, and `changed` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from quantexp.capture.statistics.fidelity import Chosen
from quantexp.capture.statistics.summary import (
    Summary,
    as_input,
    kernel_for,
    summarise,
    summarise_all,
)


class Deferred:
    """A tensor's statistics, which are to be counted."""

    def __init__(self, x: Tensor, chosen: Chosen | None = None) -> None:
        self.chosen = chosen
        #: Whether the tensor was no longer what it had been when it was counted.
        self.changed = False
        #: The tensor, or what gives a copy of it.
        self._held: Tensor | Callable[[], Tensor] | None = x.detach() if x.requires_grad else x
        self._version = x._version
        self._summary: Summary | None = None
        self._record: dict[str, Any] | None = None

    @property
    def is_counted(self) -> bool:
        """Whether the tensor is held no longer."""
        return self._held is None

    @property
    def is_settled(self) -> bool:
        """Whether the tensor may change: it is counted, or a copy of it will be."""
        return not isinstance(self._held, Tensor)

    @property
    def num_bytes(self) -> int:
        """How much memory is held; a copy is whose that made it."""
        held = self._held
        return held.numel() * held.element_size() if isinstance(held, Tensor) else 0

    def is_of(self, x: Tensor) -> bool:
        """Whether it is this tensor that is to be counted, whole."""
        held = self._held
        return (
            isinstance(held, Tensor) and held.data_ptr() == x.data_ptr() and held.shape == x.shape
        )

    def look_at(self, copied: Callable[[], Tensor]) -> None:
        """Look at a copy instead, which is asked for when it is counted."""
        self._held = copied

    def record(self) -> dict[str, Any]:
        """The statistics as JSON holds them, the same each time; of a tensor that has changed none."""
        if self._record is None:
            count_all([self])
            self._record = {} if self._summary is None else self._summary.record()
        return self._record

    def take(self) -> Tensor | None:
        """The tensor, if it is still to be counted."""
        held = self._held
        return held() if callable(held) else held

    def end(self, summary: Summary) -> None:
        """What was found; the tensor is let go."""
        self.changed = isinstance(self._held, Tensor) and self._held._version != self._version
        self._summary, self._held = None if self.changed else summary, None


def deferred(x: Tensor, chosen: Chosen | None = None) -> Deferred | Summary:
    """The statistics of a tensor that stays as it is, later if that is quicker."""
    if x.device.type != "cpu" or kernel_for(x) is None or x.is_inference():
        return summarise(x, chosen)
    return Deferred(x, chosen)


def count_all(all_deferred: Iterable[Deferred]) -> None:
    """Count those that are not counted yet, each once."""
    held = [(one, x) for one in dict.fromkeys(all_deferred) if (x := one.take()) is not None]
    if not held:
        return
    tensors = [(as_input(x), one.chosen) for one, x in held]
    kernel = kernel_for(tensors[0][0])
    assert kernel is not None, "deferred where there is one"
    for (one, _), summary in zip(held, summarise_all(kernel, tensors), strict=True):
        one.end(summary)

"""Deferred statistics: computed later, in parallel with training; until then the tensor is referenced, not copied.

One call computes the statistics of many tensors without holding the GIL. The caller must make sure that a tensor is
counted before it changes (a weight, before the optimizer steps). If autograd's version counter shows that the tensor
has changed anyway, there are no statistics, and `changed` is true.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
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

#: Held while statistics are stored: training and a background thread may compute the same ones.
_ENDING = threading.Lock()


class Deferred:
    """The pending statistics of a tensor."""

    def __init__(self, x: Tensor, chosen: Chosen | None = None) -> None:
        self.chosen = chosen
        #: Whether the tensor changed before it was counted.
        self.changed = False
        #: The tensor, or a function that returns a copy of it.
        self._tensor: Tensor | Callable[[], Tensor] | None = x.detach() if x.requires_grad else x
        self._version = x._version
        self._summary: Summary | None = None
        self._record: dict[str, Any] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the tensor may change, because its statistics are computed or use a copy."""
        return not isinstance(self._tensor, Tensor)

    @property
    def num_bytes(self) -> int:
        """The bytes of the referenced tensor; a copy belongs to its maker."""
        tensor = self._tensor
        return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0

    def is_of(self, x: Tensor) -> bool:
        """Whether these are the pending statistics of exactly this tensor."""
        tensor = self._tensor
        return (
            isinstance(tensor, Tensor)
            and tensor.data_ptr() == x.data_ptr()
            and tensor.shape == x.shape
        )

    def look_at(self, copied: Callable[[], Tensor]) -> None:
        """Use a copy instead, which is requested when the statistics are computed."""
        self._tensor = copied

    def record(self) -> dict[str, Any]:
        """The statistics as JSON, the same on every call; none for a tensor that has changed."""
        if self._record is None:
            count_all([self])
            self._record = {} if self._summary is None else self._summary.record()
        return self._record

    @property
    def summary(self) -> Summary | None:
        """The computed summary; None before, and for a tensor that has changed."""
        return self._summary

    def shares(self) -> tuple[float, float] | None:
        """`Summary.shares`; None before the statistics are computed, and for a tensor that has changed."""
        return None if self._summary is None else self._summary.shares()

    def take(self) -> Tensor | None:
        """The tensor; None if its statistics are already computed."""
        tensor = self._tensor
        return tensor() if callable(tensor) else tensor

    def end(self, summary: Summary) -> None:
        """Store the statistics and release the tensor; the first ones count."""
        with _ENDING:
            tensor = self._tensor
            if tensor is None:
                return
            self.changed = isinstance(tensor, Tensor) and tensor._version != self._version
            self._summary, self._tensor = None if self.changed else summary, None


def deferred(x: Tensor, chosen: Chosen | None = None) -> Deferred | Summary:
    """The statistics of a tensor that does not change, deferred if that is faster."""
    if x.device.type != "cpu" or kernel_for(x) is None or x.is_inference():
        return summarise(x, chosen)
    return Deferred(x, chosen)


def count_all(all_deferred: Iterable[Deferred]) -> None:
    """Compute all pending statistics, each once."""
    pending = [(d, x) for d in dict.fromkeys(all_deferred) if (x := d.take()) is not None]
    if not pending:
        return
    tensors = [(as_input(x), d.chosen) for d, x in pending]
    kernel = kernel_for(tensors[0][0])
    assert kernel is not None, "deferred where there is one"
    for (d, _), summary in zip(pending, summarise_all(kernel, tensors), strict=True):
        d.end(summary)


def all_summaries(statistics: Sequence[Summary | Deferred]) -> list[Summary | None]:
    """Each one's summary, computed now where it is pending; None for a tensor that has changed."""
    count_all(each for each in statistics if isinstance(each, Deferred))
    return [each.summary if isinstance(each, Deferred) else each for each in statistics]

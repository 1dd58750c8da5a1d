"""Numbers of several tensors from their histograms at once: on a GPU, launches take longest for one alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

#: Histograms that wait at a time; each takes half a megabyte, and some more while its numbers are computed.
MOST = 32


class Pending:
    """The numbers of one tensor, which are computed when they or those of enough others are asked for."""

    def __init__(self, together: Together, counts_V: Tensor) -> None:
        self._together = together
        #: None once the numbers are computed.
        self.counts: Tensor | None = counts_V
        #: None before.
        self.rows: Rows | None = None
        self.index = 0

    def numbers(self) -> Tensor:
        """The numbers, float64, on the tensor's device."""
        return self._complete().on_device[self.index]

    def on_host(self) -> Tensor:
        """The same in the host's memory; the first one asked for copies those that were computed with it."""
        return self._complete().on_host[self.index]

    def _complete(self) -> Rows:
        self._together.complete(self)
        assert self.rows is not None, "complete"
        return self.rows


class Rows:
    """Numbers that were computed together, [K, ...]."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device

    @cached_property
    def on_host(self) -> Tensor:
        """The same in the host's memory."""
        return self.on_device.cpu()


class Together:
    """Histograms of one dtype on one device, of which `describe` makes numbers: [K, V] to [K, ...].

    May be used by several threads.
    """

    def __init__(self, describe: Callable[[Tensor], Tensor]) -> None:
        self._describe = describe
        self._waiting: list[Pending] = []
        self._lock = threading.Lock()

    def add(self, counts_V: Tensor) -> Pending:
        """Let one more wait."""
        pending = Pending(self, counts_V)
        with self._lock:
            self._waiting.append(pending)
            if len(self._waiting) == MOST:
                self._describe_all()
        return pending

    def complete(self, pending: Pending) -> None:
        """Compute the numbers of all that wait, unless this one has its own."""
        with self._lock:
            if pending.rows is None:
                self._describe_all()

    def _describe_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        counts_KV = torch.stack([each.counts for each in waiting if each.counts is not None])
        rows = Rows(self._describe(counts_KV))
        for index, each in enumerate(waiting):
            each.rows, each.index, each.counts = rows, index, None

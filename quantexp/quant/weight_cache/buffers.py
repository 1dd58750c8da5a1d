"""Memory of quantised operands on a CPU, written again by each step, and by each product.

There the pages of a large fresh tensor cost more than quantising into it: the system hands them out one by one, filled
with zeros, and takes them back when the tensor goes. On a GPU torch's allocator keeps what was freed, and nothing is
kept here.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Buffers:
    """Tensors to write copies to, within a step; nobody may hold on to one for longer than it is lent."""

    def __init__(self) -> None:
        self._is_lending = False
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._lent: dict[int, Tensor] = {}
        self._scratch: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """From now on tensors are lent."""
        self._is_lending = True

    def end_step(self) -> None:
        """All that was lent is free, and what was not needed is given back to the system."""
        self._is_lending = False
        self._free.clear()
        for buffer in self._lent.values():
            self._free[buffer.shape, buffer.dtype].append(buffer)
        self._lent.clear()

    def until_the_step_ends(self, like: Tensor) -> Tensor | None:
        """A tensor of that shape and dtype; None is fresh memory: outside of steps, on a GPU, for another layout."""
        if not self._lends(like):
            return None
        free = self._free[like.shape, like.dtype]
        buffer = free.pop() if free else torch.empty_like(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def until_the_next(self, use: str, like: Tensor) -> Tensor | None:
        """The same, until one is asked for the same use again, of whatever shape."""
        if not self._lends(like):
            return None
        scratch = self._scratch.get(use)
        if scratch is None or scratch.numel() < like.numel() or scratch.dtype != like.dtype:
            scratch = self._scratch[use] = torch.empty(like.numel(), dtype=like.dtype)
        return scratch[: like.numel()].view(like.shape)

    def give_away(self, buffer: Tensor) -> None:
        """Somebody holds on to what was lent until the step ends: it is never written again."""
        self._lent.pop(id(buffer), None)

    def _lends(self, like: Tensor) -> bool:
        return self._is_lending and like.device.type == "cpu" and like.is_contiguous()

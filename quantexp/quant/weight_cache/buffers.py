"""Reusable memory for quantised operands on a CPU, shared by the products of a step.

On a CPU the pages of a large fresh tensor cost more than quantising into it: the system maps them one by one, filled
with zeros, and unmaps them when the tensor is freed. On a GPU torch's allocator caches freed memory, so this module
lends nothing there.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Buffers:
    """Tensors to write copies to within a step; a borrower must not keep one beyond its loan."""

    def __init__(self) -> None:
        self._is_lending = False
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._lent: dict[int, Tensor] = {}
        self._scratch: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Start lending tensors."""
        self._is_lending = True

    def end_step(self) -> None:
        """Reclaim every lent tensor, and free those that the step did not use."""
        self._is_lending = False
        self._free.clear()
        for buffer in self._lent.values():
            self._free[buffer.shape, buffer.dtype].append(buffer)
        self._lent.clear()

    def for_step(self, like: Tensor) -> Tensor | None:
        """A tensor of that shape and dtype until the step ends; None outside steps, on a GPU, and if not contiguous."""
        if not self._lends(like):
            return None
        free = self._free[like.shape, like.dtype]
        buffer = free.pop() if free else torch.empty_like(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def for_next_use(self, use: str, like: Tensor) -> Tensor | None:
        """A tensor until the next call with the same use, of any shape; None means fresh memory."""
        if not self._lends(like):
            return None
        scratch = self._scratch.get(use)
        if scratch is None or scratch.numel() < like.numel() or scratch.dtype != like.dtype:
            scratch = self._scratch[use] = torch.empty(like.numel(), dtype=like.dtype)
        return scratch[: like.numel()].view(like.shape)

    def disown(self, buffer: Tensor) -> None:
        """Give up a lent tensor that someone keeps: it is never overwritten."""
        self._lent.pop(id(buffer), None)

    def _lends(self, like: Tensor) -> bool:
        return self._is_lending and like.device.type == "cpu" and like.is_contiguous()

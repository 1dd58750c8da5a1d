"""Ranks as threads of this process, whose registered maximum meets in a barrier: a process group without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from quantexp.quant.precision import ModuleId
from quantexp.quant.whole_amax import use_reduction

_Result = TypeVar("_Result")


class Ranks:
    """Runs the same function on every rank; a rank that fails ends all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: Every reduction of rank 0, in order.
        self.reductions: list[tuple[ModuleId, tuple[int, ...]]] = []
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[tuple[ModuleId, Tensor]] = []
        self._own = threading.local()

    @property
    def rank(self) -> int:
        """The rank of this thread."""
        rank: int = self._own.rank
        return rank

    def run(self, work: Callable[[int], _Result], *, is_reduced: bool = True) -> list[_Result]:
        """The results of all ranks; without reduction each rank has the amaxes of its own part."""
        reduce = self._reduce if is_reduced else lambda module, amax: amax
        with use_reduction(reduce), ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._run_one, work, rank) for rank in range(self.size)]
            for future in futures:
                if (error := future.exception()) and not isinstance(
                    error, threading.BrokenBarrierError
                ):
                    raise error
            return [future.result() for future in futures]

    def _run_one(self, work: Callable[[int], _Result], rank: int) -> _Result:
        self._own.rank = rank
        try:
            return work(rank)
        except BaseException:
            self._barrier.abort()
            raise

    def _reduce(self, module: ModuleId, amax: Tensor) -> Tensor:
        if self.rank == 0:
            self._parts = [None] * self.size  # type: ignore[list-item]
            self.reductions.append((module, tuple(amax.shape)))
        self._barrier.wait()
        self._parts[self.rank] = module, amax
        self._barrier.wait()
        modules, amaxes = zip(*self._parts, strict=True)
        assert set(modules) == {module}, "every rank reduces the same operand"
        self._barrier.wait()
        return torch.stack(amaxes).amax(dim=0)

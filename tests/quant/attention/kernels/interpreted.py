"""Attention by the Triton kernels on a CPU, called in Triton's interpreter (`tests/triton_interpreter.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import Tensor

from quantexp.errors import EngagementError
from quantexp.formats.kernels import gpu as quantising
from quantexp.quant.attention import tiled, tiles
from quantexp.quant.attention.kernels import gpu, launches
from quantexp.quant.hooks import no_hook
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import watch_products
from quantexp.quant.sites import Slot
from quantexp.quant.step_state import StepState, use_step_state

from .tiled_cases import Result, by_tiles

Case = tuple[ModulePrecision, list[Tensor], Tensor | None, tuple[int, int]]


@contextmanager
def kernels_alone(rows: int, keys: int) -> Iterator[None]:
    """Let the kernels accept CPU tensors, in tiles of that size; unsupported calls fail."""
    launch = launches.Launch(rows, keys, 4, 1)
    with (
        patch.object(quantising, "reads", lambda x: True),
        patch.dict(launches.LAUNCHES, dict.fromkeys(launches.LAUNCHES, launch)),
        patch.object(tiles, "ROWS", 32),
        patch.object(tiled.Forward, "output", _not_called),  # type: ignore[attr-defined]
        patch.object(tiled.Backward, "gradients", _not_called),  # type: ignore[attr-defined]
        use_step_state(StepState(1)) as state,
    ):
        state.begin(1, 0)
        yield


def _not_called(self: object) -> Tensor:
    raise AssertionError("the tiles of torch were made")


def attention(case: Case, is_whole: bool = False) -> Result:
    """o, dq, dk and dv."""
    precision, tensors, mask, sizes = case
    with kernels_alone(*sizes):
        return by_tiles(precision, tensors, mask, is_whole=is_whole)


def watched_attention(case: Case, left_out: Slot | None = None) -> str | Result:
    """The same while the torch tiles check the kernels, one of which may not quantise P or dS; or the error message."""
    how = gpu.Kernels._how

    def without(self: gpu.Kernels, slot: Slot) -> tuple[object, ...]:
        return (0,) if slot == left_out else how(self, slot)

    with (
        patch.object(gpu.Kernels, "_how", without) if left_out else nullcontext(),
        watch_products(),
    ):
        try:
            return _beside_tiles(case)
        except EngagementError as error:
            return str(error)


def observed_attention(case: Case, name: str) -> int:
    """How many tensors of that name reach a hook that asks for no other."""
    hook = _Hook(name)
    _beside_tiles(case, hook)
    return hook.calls


class _Hook:
    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def asks(self, operation: object, name: str) -> bool:
        return name == self.name

    def __call__(self, operation: object, phase: object, name: str, tensor: Tensor) -> None:
        self.calls += name == self.name


def _beside_tiles(case: Case, hook: Any = no_hook) -> Result:
    """o, dq, dk and dv, where the torch tiles may check the kernels."""
    precision, tensors, mask, sizes = case
    forward, backward = tiled.Forward.output, tiled.Backward.gradients  # type: ignore[attr-defined]
    with (
        kernels_alone(*sizes),
        patch.object(tiled.Forward, "output", forward),  # type: ignore[attr-defined]
        patch.object(tiled.Backward, "gradients", backward),  # type: ignore[attr-defined]
    ):
        return by_tiles(precision, tensors, mask, hook)

"""Delayed scaling: the amax of previous steps, over a window, instead of the tensor's own.

A step observes all its tensors (`observe`) and ends with `advance`, which appends the largest observed amax to the
history. `amax` is the largest of the last `window` steps; it is constant within a step, whatever the number of tensors.
Reading `amax` observes nothing: recomputation and evaluation read without observing. Before the first step ends
there is no history, and a tensor is scaled by its own amax.

    quantise(x, "hifp8", scaling="delayed", amax=history.amax_for(x))

Amaxes are those of `finite_amax`; they stay on the tensor's device and never synchronise with it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.families import finite_amax


class AmaxHistory:
    """The amaxes of one operand in the last steps.

    Args:
        window: number of steps, at least 1.

    Raises:
        ValueError: an invalid window.
    """

    def __init__(self, window: int) -> None:
        check_window(window)
        self.window = window
        self._steps: deque[Tensor] = deque(maxlen=window)
        self._running: Tensor | None = None

    @property
    def amaxes(self) -> list[Tensor]:
        """The amaxes of the last steps, the oldest first, each 0-dim float32."""
        return list(self._steps)

    @property
    def amax(self) -> Tensor | None:
        """The largest amax of the last steps, 0-dim float32; None before the first step ends."""
        return torch.stack(list(self._steps)).amax() if self._steps else None

    @property
    def running(self) -> Tensor | None:
        """The largest amax of the current step, 0-dim float32; None before its first tensor."""
        return self._running

    def amax_for(self, x: Tensor) -> Tensor:
        """The amax that scales x: the history's, or x's own if there is no history."""
        amax = self.amax
        return finite_amax(x) if amax is None else amax

    def observe(self, x: Tensor) -> None:
        """Include x's amax in the current step."""
        self.include(finite_amax(x))

    def include(self, amax: Tensor) -> None:
        """Include an amax, 0-dim float32, in the current step."""
        self._running = amax if self._running is None else torch.maximum(self._running, amax)

    def advance(self, keep: bool = True) -> None:
        """End the step. A step without observations, or that is not kept, is not recorded."""
        if keep and self._running is not None:
            self._steps.append(self._running)
        self._running = None

    def state_dict(self) -> dict[str, Any]:
        """The history as plain numbers, exactly; the current step is not included."""
        return {"window": self.window, "amaxes": [float(amax) for amax in self._steps]}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: if it has another window.
        """
        if state["window"] != self.window:
            raise ValueError(
                f"an amax history of {state['window']} steps cannot continue one of {self.window}"
            )
        steps = [torch.tensor(a, dtype=torch.float32, device=device) for a in state["amaxes"]]
        self._steps = deque(steps, maxlen=self.window)
        self._running = None


def check_window(window: int) -> None:
    """Refuse an invalid window.

    Raises:
        ValueError: unless it is an integer of at least 1.
    """
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"a window of steps must be an integer of at least 1, got {window!r}")

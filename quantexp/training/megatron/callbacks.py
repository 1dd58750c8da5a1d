"""What the training loop calls: an observer at every point of an iteration, and a saver after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from megatron.core.models.gpt.gpt_model import GPTModel

from quantexp.quant.precision import PrecisionMap
from quantexp.runs.metrics import Metrics

#: Iteration, whether it is the last, the model, and what else training goes on with.
Saver = Callable[[int, bool, GPTModel, Callable[[], dict[str, Any]]], None]


class Observer(Protocol):
    """What the loop tells about itself; every method may raise to end the run."""

    #: Whether the last proof could not tell, so that the next iteration is watched again.
    unproved: bool

    def built(self, model: GPTModel) -> None:
        """The model is there, before the first iteration."""

    def proof(
        self, iteration: int, declared: PrecisionMap
    ) -> contextlib.AbstractContextManager[None]:
        """A context for the forward and backward passes of an iteration to be proved."""

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        """The forward pass of a micro-batch (from 0) begins; its gradients will be larger by the scale (fp16)."""

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Forward and backward are done, the optimizer has not stepped."""

    def evaluation(self) -> None:
        """Forward passes follow that are no part of the training, until the next micro-batch begins."""

    def iteration(self, metrics: Metrics) -> bool:
        """An iteration is over; False ends the run here, as completed."""

"""Callbacks of the training loop: an observer for the events of an iteration, and a saver after each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.core.models.gpt.gpt_model import GPTModel

from quantexp.quant.precision import PrecisionMap
from quantexp.runs.metrics import Metrics
from quantexp.training.megatron.state_shards import RankState

#: Arguments: the iteration, whether it is the last, this rank's chunks of the model, and a function that returns the
#: training state that this rank writes. Every rank calls it.
Saver = Callable[[int, bool, Sequence[GPTModel], Callable[[], RankState]], None]


class Observer(Protocol):
    """Receives the loop's events; every method may raise to end the run."""

    #: Whether the last proof was inconclusive and the next iteration must be watched, too.
    unproved: bool

    def built(self, chunks: list[GPTModel]) -> None:
        """This rank's parts of the model are built; the first iteration follows."""

    def proof(
        self, iteration: int, declared: PrecisionMap
    ) -> contextlib.AbstractContextManager[None]:
        """A context for the forward and backward passes of an iteration to be proved."""

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        """The forward pass of micro-batch `index` (from 0) begins; in fp16 its gradients are scaled by `loss_scale`.

        In a pipeline its backward pass begins with the same call.
        """

    def needs_gradients(self, iteration: int) -> bool:
        """Whether `gradients` reads the main gradients of this iteration; the same on all ranks."""

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Forward and backward are complete; the optimizer has not stepped."""

    def evaluation(self) -> None:
        """All forward passes until the next micro-batch belong to an evaluation."""

    def iteration(self, metrics: Metrics) -> bool:
        """An iteration is complete; False ends the run as completed."""

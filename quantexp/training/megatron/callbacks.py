"""Callbacks of the training loop: an observer for the events of an iteration, and a saver of checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.proof.outside_products import StateWatch
from quantexp.proof.saved_state import Elements
from quantexp.proof.updates import Used
from quantexp.quant.precision import PrecisionMap
from quantexp.runs.metrics import Metrics
from quantexp.training.megatron.state_shards import RankState
from quantexp.training.requests import Request


class Saver(Protocol):
    """Writes checkpoints; every rank calls each method at the same point."""

    def save(
        self,
        iteration: int,
        chunks: Sequence[GPTModel],
        state: Callable[[], RankState],
        nonfinite: int,
        seen: Callable[[int], Elements],
    ) -> None:
        """Save a checkpoint of what training holds now.

        Args:
            iteration: the last complete one.
            chunks: this rank's chunks of the model.
            state: returns the training state that this rank writes.
            nonfinite: steps in a row, up to this iteration, that were left out.
            seen: returns elements of what this rank writes of the training state, with which its file is compared.

        Raises:
            EngagementError: the file has others.
            OSError, RunError: this checkpoint, or the one before, could not be written or has a NaN or Inf.
        """

    def finish(self) -> None:
        """Wait until the last checkpoint is whole.

        Raises:
            OSError, RunError: as `save`.
        """


class Observer(Protocol):
    """Receives the loop's events; every method may raise to end the run."""

    @property
    def unproved(self) -> bool:
        """Whether the last proof was inconclusive and the next iteration must be watched, too."""

    def built(self, chunks: list[GPTModel]) -> None:
        """This rank's parts of the model are built; the first iteration follows."""

    def proof(
        self, iteration: int, declared: PrecisionMap, *, is_complete: bool
    ) -> contextlib.AbstractContextManager[None]:
        """A context for the forward and backward passes of an iteration, proved completely or in drawn parts."""

    def proof_of_evaluation(
        self, iteration: int, declared: PrecisionMap, *, quantised: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """A context for the forward passes of an evaluation after an iteration, proved in drawn parts.

        `quantised`: under the scheme; otherwise no slot is quantised.
        """

    def outside_products(self, watch: StateWatch, stepped: bool) -> None:
        """The rest of an iteration to be proved: what this rank rounded outside of products, if the optimizer stepped.

        Every rank calls this.
        """

    def updated(self, iteration: int, used: Used, wrong: list[str]) -> None:
        """The optimizer stepped, or left it out.

        `used` is what the iteration had, by the names of metrics.jsonl. `wrong` says what is wrong with its step on
        this rank. Every rank calls this.
        """

    def evaluated(self, iteration: int, loss: float, wrong: list[str]) -> None:
        """An evaluation gave this loss; `wrong` says what is wrong with its weights. Every rank calls this."""

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        """The forward pass of micro-batch `index` (from 0) begins; in fp16 its gradients are scaled by `loss_scale`.

        In a pipeline its backward pass begins with the same call.
        """

    def tokens(self, iteration: int, index: int, tokens: Tensor) -> None:
        """This rank's micro-batch `index` has these ids, [B, T]; before its forward pass begins."""

    def needs_gradients(self, iteration: int) -> bool:
        """Whether `gradients` reads the main gradients of this iteration; the same on all ranks."""

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Forward and backward are complete; the optimizer has not stepped."""

    def evaluation(self) -> None:
        """All forward passes until the next micro-batch belong to an evaluation."""

    def iteration(self, metrics: Metrics) -> bool:
        """An iteration is complete; False ends the run as completed."""

    def request(self) -> Request:
        """What is asked for after the iteration; the same on all ranks."""

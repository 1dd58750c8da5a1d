"""The forward and backward passes of one optimizer step, or the forward passes of an evaluation, in any layout.

Megatron's schedules run the micro-batches: one after another, or through the stages of a pipeline (1F1B, interleaved).
In a pipeline a backward pass follows forward passes of later micro-batches. Random numbers, delayed scales and captured
tensors depend on the micro-batch, so each backward pass begins by restoring its own.

The loss of a micro-batch is the mean over its unmasked tokens. Under context parallelism each rank sums its own tokens
and divides by the count of the whole sequences; Megatron multiplies by the number of ranks, over which gradients are
then averaged. A sequence is cut into 2 N chunks for N ranks; rank r holds chunks r and 2 N - 1 - r, so that all ranks
have as much of the causal mask. Attention masks stay whole: the core attention takes the rows of its queries.

    # B sequences of a micro-batch, T tokens
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from quantexp.model.layout import Layout
from quantexp.schema import TrainingConfig

Batch = dict[str, Tensor]
#: What has a value for each token, along its last axis.
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids", "documents")
#: Called with the micro-batch's index among a rank's own, before its forward pass and again before its backward pass.
Begin = Callable[[int], None]
#: The result of a forward pass for Megatron: the losses, and what makes one number of them.
_Forward = tuple[Tensor, Callable[[Tensor], Any]]
#: The same for logits.
_Logits = tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Any]]]]


class Passes:
    """Runs the passes of a rank's model chunks."""

    def __init__(
        self, chunks: list[Any], training: TrainingConfig, layout: Layout, device: torch.device
    ) -> None:
        self.chunks, self.training = chunks, training
        self.layout, self.device = layout, device
        self._run = get_forward_backward_func()

    def train(self, batches: Iterator[Batch], num_micro_batches: int, begin: Begin) -> list[Tensor]:
        """Forward and backward passes; this rank's part of each micro-batch's loss, on the last stage only."""
        calls = Counter[int]()

        def forward_step(chunk_batches: Iterator[Batch], model: Any) -> _Forward:
            index = calls[id(model)]
            calls[id(model)] += 1
            begin(index)
            batch = self._on_device(next(chunk_batches))
            losses = self._losses(model, batch)
            if self.layout.pipeline > 1:
                begin_backward(losses, lambda: begin(index))
            return losses, lambda x: _mean_loss(x, batch)

        results = self._schedule(forward_step, batches, num_micro_batches, forward_only=False)
        return [each["loss"] for each in results]

    def evaluate(self, held_out: Iterable[Batch]) -> Tensor:
        """The summed loss of this rank's unmasked tokens and their number, float64 [2]; 0 before the last stage."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)

        def forward_step(chunk_batches: Iterator[Batch], model: Any) -> _Forward:
            batch = self._on_device(next(chunk_batches))
            return self._losses(model, batch), lambda x: _summed_loss(x, batch)

        batches = iter(held_out)
        while group := list(itertools.islice(batches, self.layout.pipeline)):
            results = self._schedule(forward_step, iter(group), len(group), forward_only=True)
            sums += sum(each["sums"] for each in results)
        return sums

    def logits(
        self, batches: Sequence[Batch], begin: Callable[[int], None]
    ) -> list[tuple[Batch, Tensor]]:
        """Each micro-batch on the device with its logits, [B, T, V] in the working dtype; none before the last stage.

        T are this rank's tokens, V is the whole padded vocabulary. As many micro-batches as the pipeline has stages
        run together.
        """
        calls = Counter[int]()

        def forward_step(chunk_batches: Iterator[Batch], model: Any) -> _Logits:
            begin(calls[id(model)])
            calls[id(model)] += 1
            batch = self._on_device(next(chunk_batches))
            narrow = {"fp32_output": False} if isinstance(model, Float16Module) else {}
            x = model(
                batch["tokens"],
                batch["position_ids"],
                batch.get("attention_mask"),
                runtime_gather_output=True,
                **narrow,
            )
            return x, lambda logits: (logits.new_zeros(()), {"logits": (batch, logits)})

        results = self._schedule(forward_step, iter(batches), len(batches), forward_only=True)
        return [each["logits"] for each in results]

    def _schedule(
        self, forward_step: Any, batches: Iterator[Batch], number: int, forward_only: bool
    ) -> list[Any]:
        by_chunk = itertools.tee(itertools.islice(batches, number), len(self.chunks))
        results: list[Any] = self._run(
            forward_step_func=forward_step,
            data_iterator=list(by_chunk) if len(self.chunks) > 1 else by_chunk[0],
            model=self.chunks,
            num_microbatches=number,
            seq_length=self.training.seq_length,
            micro_batch_size=self.training.micro_batch_size,
            forward_only=forward_only,
        )
        return results

    def _on_device(self, batch: Batch) -> Batch:
        """A micro-batch on the device, its tokens those of this rank; with the count of all its unmasked tokens."""
        count = batch["loss_mask"].sum()
        batch = {**own_tokens(batch, self.layout.context), "count": count}
        return {key: moved(value, self.device) for key, value in batch.items()}

    def _losses(self, model: Any, batch: Batch) -> Tensor:
        """The loss of each token, [B, T], on the last stage; a hidden state before it."""
        mask = batch.get("attention_mask")  # None means causal
        losses: Tensor = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        return losses


def own_tokens(batch: Batch, num_ranks: int) -> Batch:
    """The micro-batch with this rank's tokens; T must be a multiple of 2 `num_ranks`."""
    if num_ranks == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    return {
        key: zigzag(value, rank, num_ranks) if key in _BY_TOKEN else value
        for key, value in batch.items()
    }


def zigzag(x: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's two chunks of x along the last axis, in order."""
    chunks = x.chunk(2 * num_ranks, dim=-1)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]], dim=-1)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. A copy from ordinary memory would wait for all that the GPU still computes."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def begin_backward(x: Tensor, begin: Callable[[], None]) -> None:
    """Call a function before the backward pass of x, the last tensor of a forward pass, goes on from there.

    A hook and no node of autograd: a stage frees the tensor that it has sent, which must therefore be no view.
    """

    def call(gradient: Tensor) -> None:
        begin()

    x.register_hook(call)  # type: ignore[no-untyped-call]


def _mean_loss(losses_BT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The rank's part of the mean over unmasked tokens."""
    loss = (losses_BT.float() * batch["loss_mask"]).sum() / batch["count"]
    # A copy: Megatron divides the loss by the number of micro-batches in place.
    return loss, {"loss": loss.detach().clone()}


def _summed_loss(losses_BT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    mask_BT = batch["loss_mask"]
    total = (losses_BT.double() * mask_BT).sum()
    return total, {"sums": torch.stack([total, mask_BT.sum().double()])}

"""One iteration of Megatron-LM's loop: the first forward and backward passes of it are proved and captured.

Megatron-LM may run the passes of an iteration again, on the same data, to see whether a NaN or a spike repeats itself
(its rerun state machine). A repeated run draws the same random numbers; it is neither proved nor captured, and enters
no amax history. Scheme and observer are told which micro-batch Megatron-LM's schedule computes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from quantexp.capture.store.queue import wait_for_copies
from quantexp.extras.megatron_lm.run import LmRun
from quantexp.model.sizes import flops_per_iteration
from quantexp.runs.metrics import Metrics
from quantexp.schema import Precision
from quantexp.training.megatron.collectives import complete_gradients
from quantexp.training.megatron.device import memory_gb
from quantexp.training.megatron.passes import Begin, begin_backward


class LmStep:
    """One call of Megatron-LM's `train_step`."""

    def __init__(self, run: LmRun, forward_backward: Callable[..., Any], optimizer: Any) -> None:
        self.run, self.iteration = run, run.begin_iteration()
        self._forward_backward, self._optimizer = forward_backward, optimizer
        self._runs = self._num_micro_batches = 0
        self._start = time.perf_counter()
        self._lr = float(optimizer.param_groups[0]["lr"])
        is_scaled = run.experiment.training.precision is Precision.fp16
        self._scale = float(optimizer.get_loss_scale()) if is_scaled else None

    def forward_backward(self, *, forward_step_func: Callable[..., Any], **kwargs: Any) -> Any:
        """Megatron's schedule, watched the first time that it runs in this iteration."""
        run, self._num_micro_batches = self.run, kwargs["num_microbatches"]
        self._runs += 1
        is_first = self._runs == 1
        if not is_first:
            run.observer.evaluation()
        run.state.updates_histories = is_first
        step = told_micro_batches(
            forward_step_func, self._begin if is_first else self._begin_draws, run.is_pipelined
        )
        proof = run.proof(self.iteration) if is_first else contextlib.nullcontext()
        copies = run.weight_copies(self._num_micro_batches)
        with proof, self._watched_tokens(is_first), copies:
            losses = self._forward_backward(forward_step_func=step, **kwargs)
        run.state.updates_histories = True
        if is_first:
            self._gradients()
        return losses

    def finish(self, result: Any) -> Any:
        """Record the iteration, from what `train_step` returns; the same with a request to end, if the capture is."""
        losses, skipped, should_checkpoint, should_exit, *rest = result
        run, grad_norm = self.run, rest[1]
        run.is_new = False
        if should_exit:
            return result
        run.state.finish(not skipped or self._scale is not None, run.merge)
        loss = mean_loss(run, losses.get("lm loss", torch.zeros(())))
        norm = math.nan if grad_norm is None else float(grad_norm)
        seconds = time.perf_counter() - self._start
        training = run.experiment.training
        sequences = (
            self._num_micro_batches
            * training.micro_batch_size
            * parallel_state.get_data_parallel_world_size()
        )
        tokens = sequences * training.seq_length
        flops = flops_per_iteration(run.experiment.model, training.seq_length, sequences)
        words = f"Megatron-LM's optimizer left the step out: loss {loss}, gradient norm {norm}"
        continues = run.observer.iteration(
            Metrics(
                iteration=self.iteration,
                loss=loss,
                grad_norm=norm,
                lr=self._lr,
                tokens=tokens,
                step_time_s=seconds,
                tokens_per_s=tokens / seconds,
                tflops=flops / seconds / 1e12,
                memory_gb=memory_gb(run.device),
                skipped=bool(skipped),
                nonfinite=words if skipped else None,
                loss_scale=self._scale,
            )
        )
        if continues:
            return result
        return (losses, skipped, should_checkpoint, True, 0, *rest[1:])

    @contextlib.contextmanager
    def _watched_tokens(self, is_first: bool) -> Iterator[None]:
        """Show the observer the tokens that reach the embedding."""
        first = self.run.chunks[0]
        if not is_first or not first.pre_process:
            yield
            return

        def show(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = args[0] if args else kwargs["input_ids"]
            self.run.observer.tokens(self.iteration, self._index, tokens)

        handle = first.register_forward_pre_hook(show, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _begin(self, index: int) -> None:
        self._begin_draws(index)
        self._index = index
        self.run.observer.micro_batch(self.iteration, index, self._scale)

    def _begin_draws(self, index: int) -> None:
        begin_draws(self.run, self.iteration, index)

    def _gradients(self) -> None:
        """Capture what is asked for of the reduced gradients, which the optimizer has not read yet."""
        run = self.run
        if run.args.use_distributed_optimizer and run.observer.needs_gradients(self.iteration):
            complete_gradients(run.models)
        run.observer.gradients(self.iteration, self._scale)
        wait_for_copies(run.device)


def begin_draws(run: LmRun, iteration: int, index: int) -> None:
    """The forward or backward pass of this rank's micro-batch `index` begins: its random numbers are drawn."""
    size = parallel_state.get_data_parallel_world_size()
    run.state.begin(iteration, index * size + parallel_state.get_data_parallel_rank())


def mean_loss(run: LmRun, loss: Tensor) -> float:
    """The loss on every rank; every rank calls this, those of a pipeline's earlier stages with a loss of 0."""
    own = loss.detach().to(run.device, torch.float32, copy=True).view(())
    if run.is_pipelined:
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.all_reduce(own, group=group)
    return float(own)


def told_micro_batches(
    forward_step: Callable[..., Any], begin: Begin, is_pipelined: bool
) -> Callable[..., Any]:
    """Megatron-LM's forward step, which calls `begin` before each forward pass of a rank's micro-batch.

    In a pipeline, whose backward passes follow forward passes of later micro-batches, also before each backward pass.
    """
    calls = Counter[int]()

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        index = calls[id(model)]
        calls[id(model)] += 1
        begin(index)
        output, *rest = forward_step(data_iterator, model, *args, **kwargs)
        if is_pipelined and output.requires_grad:
            begin_backward(output, lambda: begin(index))
        return (output, *rest)

    return step

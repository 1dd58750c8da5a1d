"""One optimizer step of a Megatron-Core model over `global_batch_size` sequences in micro-batches.

The ranks share the micro-batches. Megatron's DistributedDataParallel averages the gradients over the ranks; the loss is
the mean over all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from quantexp.config.start_point import StartPoint
from quantexp.errors import DataError
from quantexp.model.sizes import flops_per_iteration, num_micro_batches_each
from quantexp.quant.step_state import StepState
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.runs.metrics import Metrics
from quantexp.schema import AuxLoss, Experiment, LrSchedule, Precision, Recompute, TrainingConfig
from quantexp.training.megatron.callbacks import Observer
from quantexp.training.megatron.collectives import mean_over_data_parallel
from quantexp.training.megatron.device import device_name, memory_gb, peak_tflops
from quantexp.training.megatron.experts import take_balancing_loss
from quantexp.training.megatron.finite import agree_on_overflow, cause, step_if_finite
from quantexp.training.megatron.model import DTYPES, build_model, share_weight_copies
from quantexp.training.megatron.published_weights import load_initial_weights

Batch = dict[str, Tensor]
#: Megatron's names of schedules that differ from ours.
_DECAY_STYLES = {LrSchedule.wsd: "WSD"}
#: The largest whole loss whose exponential a float64 can represent.
_MAX_EXP_LOSS = 709.0
#: The smallest fp16 loss scale.
MIN_LOSS_SCALE = 1.0
#: One spec for all layers, or one per layer.
Spec: TypeAlias = ModuleSpec | TransformerBlockSubmodules


class Stepper:
    """The model with its optimizer and schedule; runs single steps and evaluations."""

    def __init__(
        self,
        experiment: Experiment,
        layer_spec: Spec,
        device: torch.device,
        observer: Observer,
        step_state: StepState,
    ) -> None:
        training = experiment.training
        self.training, self.observer, self.device = training, observer, device
        self.step_state, self.moe = step_state, experiment.model.moe
        take_balancing_loss(device)  # discards the values of an earlier run of this process
        self.gpt, config = build_model(experiment.model, training, layer_spec)
        self.copies = WeightCopies()
        share_weight_copies(self.gpt, self.copies)
        start = load_initial_weights([self.gpt], experiment)
        model: Any = self.gpt.to(device)
        if training.precision is not Precision.fp32:
            model = Float16Module(config, model)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=False,
            ),
            model,
        )
        self.optimizer = get_megatron_optimizer(_optimizer_config(training), [self.model])
        agree_on_overflow(self.optimizer)
        self.scheduler = _scheduler(training, self.optimizer)
        if start is not None:
            self._resume(start)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.forward_backward = get_forward_backward_func()
        self.num_micro_batches = num_micro_batches_each(experiment)
        peak = peak_tflops(device_name(device), training.precision)
        self.peak = None if peak is None else peak * torch.distributed.get_world_size()
        self.tokens = training.global_batch_size * training.seq_length
        self.flops = flops_per_iteration(
            experiment.model, training.seq_length, training.global_batch_size
        )

    def state(self) -> dict[str, Any]:
        """The resume state besides the published weights: tensors and plain numbers."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "steps": self.scheduler.num_steps,
            "moment": self.step_state.state_dict(),
        }

    def _resume(self, start: StartPoint) -> None:
        """Restore the schedule and, if configured, the optimizer state from a checkpoint."""
        if not self.training.start_optimizer:
            self.scheduler.step(start.iteration)
            return
        state = _read_state(start.state, self.device)
        options = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, configured in zip(self.optimizer.param_groups, options, strict=True):
            group |= configured  # rates, decay and betas come from the configuration
        self.scheduler.step(state["steps"])
        self.step_state.load_state_dict(state["moment"], self.device)

    def step(
        self,
        iteration: int,
        batches: Iterator[Batch],
        proof: contextlib.AbstractContextManager[None],
    ) -> Metrics:
        """Run one optimizer step, its forward and backward passes inside `proof`."""
        start = time.perf_counter()
        fp16 = self.training.precision is Precision.fp16
        scale = float(self.optimizer.get_loss_scale()) if fp16 else None
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with proof, self._keep_weight_copies(several=self.num_micro_batches > 1):
            losses = self.forward_backward(
                forward_step_func=self._forward_step(iteration, scale),
                data_iterator=batches,
                model=[self.model],
                num_microbatches=self.num_micro_batches,
                seq_length=self.training.seq_length,
                micro_batch_size=self.training.micro_batch_size,
            )
        balancing = self._balancing_loss()
        self.observer.gradients(iteration, scale)
        own_losses = torch.stack([part["loss"] for part in losses])
        loss = float(mean_over_data_parallel(own_losses.mean()))
        self.scheduler.step(1)
        lr = float(self.optimizer.param_groups[0]["lr"])
        stepped, grad_norm = step_if_finite(self.optimizer, loss)
        if not stepped:
            self.scheduler.step(-1)  # a step that is left out does not advance the schedule
        self.step_state.finish(keep=stepped or fp16)
        nonfinite = None if stepped else cause(self.gpt, own_losses.tolist())
        step_time_s = time.perf_counter() - start
        return Metrics(
            iteration=iteration,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=self.tokens,
            step_time_s=step_time_s,
            tokens_per_s=self.tokens / step_time_s,
            tflops=self.flops / step_time_s / 1e12,
            memory_gb=memory_gb(self.device),
            skipped=not stepped,
            nonfinite=nonfinite,
            loss_scale=scale,
            aux_loss=balancing,
            mfu=None if self.peak is None else self.flops / step_time_s / 1e12 / self.peak,
        )

    @torch.no_grad()
    def evaluate(self, metrics: Metrics, held_out: Iterable[Batch]) -> Metrics:
        """Add the mean loss of all unmasked tokens of held-out samples, and their perplexity, to a step's metrics."""
        self.observer.evaluation()
        self.model.eval()
        self.step_state.updates_histories = False
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self._keep_weight_copies(several=True):
            for micro_batch in held_out:
                batch = {key: value.to(self.device) for key, value in micro_batch.items()}
                losses_BT = self._losses(self.model, batch).double()
                mask_BT = batch["loss_mask"]
                sums += torch.stack([(losses_BT * mask_BT).sum(), mask_BT.sum()])
        self.step_state.updates_histories = True
        self.model.train()
        total, count = mean_over_data_parallel(sums).tolist()
        loss = total / count if count else math.nan
        perplexity = math.exp(loss) if loss < _MAX_EXP_LOSS else math.inf
        return dataclasses.replace(metrics, validation_loss=loss, perplexity=perplexity)

    def _keep_weight_copies(self, several: bool) -> contextlib.AbstractContextManager[None]:
        """A context for passes with constant weights that reuses quantised copies, if `training.weight_cache` is on."""
        if not self.training.weight_cache:
            return contextlib.nullcontext()
        return self.copies.step(several, self.training.recompute is Recompute.full)

    def _losses(self, model: Any, batch: Batch) -> Tensor:
        mask = batch.get("attention_mask")  # None means causal
        losses_BT: Tensor = model(
            batch["tokens"], batch["position_ids"], mask, labels=batch["labels"]
        )
        return losses_BT

    def _balancing_loss(self) -> float | None:
        """The mean balancing loss of this iteration's micro-batches; None for a model without one."""
        if self.moe is None or self.moe.aux_loss is AuxLoss.none:
            return None
        own = take_balancing_loss(self.device) * self.moe.aux_loss_coefficient
        return float(mean_over_data_parallel(own / self.num_micro_batches))

    def _forward_step(self, iteration: int, scale: float | None) -> Callable[..., Any]:
        index = -1

        def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            nonlocal index
            index += 1
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self.step_state.begin(iteration, index * size + rank)
            self.observer.micro_batch(iteration, index, scale)
            batch = {key: value.to(self.device) for key, value in next(batches).items()}
            return self._losses(model, batch), lambda losses: _mean_loss(losses, batch["loss_mask"])

        return forward_step


def _mean_loss(losses_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over unmasked tokens."""
    loss = (losses_BT.float() * mask_BT).sum() / mask_BT.sum()
    # A copy: Megatron divides the loss by the number of micro-batches in place.
    return loss, {"loss": loss.detach().clone()}


def _optimizer_config(training: TrainingConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=training.precision is Precision.bf16,
        fp16=training.precision is Precision.fp16,
        params_dtype=DTYPES[training.precision],
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=MIN_LOSS_SCALE,
    )


def _scheduler(training: TrainingConfig, optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.warmup_iterations,
        lr_decay_steps=training.iterations,
        lr_decay_style=_DECAY_STYLES.get(training.lr_schedule, training.lr_schedule.value),
        wsd_decay_steps=training.decay_iterations,
        lr_wsd_decay_style="linear",
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.iterations,
        wd_incr_style="constant",
    )


def _read_state(file: Path, device: torch.device) -> dict[str, Any]:
    """The resume state that a checkpoint's file holds.

    Raises:
        DataError: the file cannot be read as one; a checkpoint with hashes was checked before.
    """
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # an unpickler may raise any exception on other bytes
        raise DataError(
            f"{file} is no resume state, or is damaged: start from another checkpoint, or without "
            "training.start_optimizer"
        ) from error
    if not isinstance(state, dict) or not {"optimizer", "steps", "moment"} <= state.keys():
        raise DataError(f"{file} is no resume state: it lacks optimizer, steps or moment")
    return state

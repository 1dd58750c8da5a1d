"""Megatron's optimizer and learning-rate schedule for a configuration."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from quantexp.runs.metrics import MIN_LOSS_SCALE
from quantexp.schema import LrSchedule, Precision, TrainingConfig
from quantexp.training.megatron.transformer_config import DTYPES

#: Megatron's names of schedules that differ from ours.
_DECAY_STYLES = {LrSchedule.wsd: "WSD"}


def optimizer_config(training: TrainingConfig, distributed: bool = False) -> OptimizerConfig:
    """Adam; `distributed`: each data-parallel rank keeps a share of the optimizer's state."""
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
        use_distributed_optimizer=distributed,
    )


def scheduler(training: TrainingConfig, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay, which steps once an iteration."""
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

"""Wraps a rank's chunks for data parallelism: fp32 gradients in buckets, reduced in the backward pass or after it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from quantexp.schema import Precision


def overlaps(device: torch.device) -> bool:
    """Whether reductions and gathers run while the device computes: a CPU would share its cores with them."""
    return device.type == "cuda"


def wrapped(
    chunks: list[Any],
    config: Any,
    precision: Precision,
    device: torch.device,
    *,
    distributed: bool,
    overlaps_reduction: bool,
) -> list[DistributedDataParallel]:
    """Each chunk on the device, in the working precision, with buckets for its gradients."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps_reduction,
        overlap_param_gather=overlaps_reduction and distributed,
        use_distributed_optimizer=distributed,
    )
    models = []
    for index, chunk in enumerate(chunks):
        model: Any = chunk.to(device)
        if precision is not Precision.fp32:
            model = Float16Module(config, model)
        models.append(DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0))
    return models


def let_schedules_overlap(config: Any, models: list[DistributedDataParallel]) -> None:
    """Let the schedules start the reduction of gradients, and the gathering of parameters, while they compute."""
    ddp = models[0].ddp_config
    if not ddp.overlap_grad_reduce:
        return

    def of_each(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    config.no_sync_func = of_each([model.no_sync for model in models])
    if len(models) > 1:
        config.grad_sync_func = of_each([model.start_grad_sync for model in models])
        if ddp.overlap_param_gather:
            config.param_sync_func = of_each([model.start_param_sync for model in models])

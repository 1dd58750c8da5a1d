"""Run before the script: saves the first step's weights, batches and reduced gradients to the file RECORDED."""

import os

import torch
from megatron.core.utils import unwrap_model
from megatron.training import training

_original = training.train_step


def _recording(forward_step, data, model, optimizer, scheduler, config, schedule, *args, **kwargs):  # type: ignore[no-untyped-def]
    (chunk,) = unwrap_model(model)
    weights = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    batches = []

    def keep(module, args, kwargs):  # type: ignore[no-untyped-def]
        tokens, positions, _ = args
        batches.append({"tokens": tokens, "position_ids": positions, "labels": kwargs["labels"]})

    def record(**kwargs):  # type: ignore[no-untyped-def]
        handle = chunk.register_forward_pre_hook(keep, with_kwargs=True)
        losses = schedule(**kwargs)
        handle.remove()
        gradients = {name: p.main_grad.clone() for name, p in chunk.named_parameters()}
        content = {"weights": weights, "batches": batches, "gradients": gradients}
        torch.save(content, os.environ["RECORDED"])
        return losses

    return _original(
        forward_step, data, model, optimizer, scheduler, config, record, *args, **kwargs
    )


training.train_step = _recording

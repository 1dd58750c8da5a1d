"""Latent attention (DeepSeek-V2) with the scheme's down projections, and with tensor parallelism.

Megatron gathers the columns of the down projection and splits them into the latent and the rotary key. Every rank uses
the rotary key for its own heads, so its gradient is a part of the sum over the ranks; Megatron 0.16 takes the own part
of the columns of it and never adds the others. `complete_columns` returns the projection in the form that Megatron's
code expects of a layer that is not divided, where the sum is part of the backward pass:

    sequence parallel   all columns of the own tokens; Megatron gathers the rotary key's tokens, and reduces in backward
    otherwise           all columns; the backward pass adds the ranks' gradients of the rotary key's
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention of the norms and projections that its spec names.

    Megatron-Core 0.19 otherwise chooses them by the backend in `transformer_impl`, and refuses queries without a latent
    where Transformer Engine is absent.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return dict(vars(submodules))


class SchemeMLASelfAttention(LatentSelfAttention):
    """Latent attention whose down projections may use a subclass of ColumnParallelLinear."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        scheme = {name: getattr(submodules, name) for name in _DOWN}
        stock = {name: megatrons(scheme_class) for name, scheme_class in scheme.items()}
        super().__init__(config, dataclasses.replace(submodules, **stock), *args, **kwargs)
        for name, scheme_class in scheme.items():
            module = getattr(self, name, None)
            if module is not None:
                module.__class__ = scheme_class
        if config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._complete)

    def _complete(self, module: Any, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        y, bias = output
        whole = complete_columns(y, self.config.kv_lora_rank, self.config.sequence_parallel)
        return whole, bias


def megatrons(scheme_class: Any) -> Any:
    """The class of Megatron's that a linear layer's class changes."""
    bases = getattr(scheme_class, "__mro__", (ColumnParallelLinear,))
    return next(base for base in bases if base.__module__.startswith("megatron."))


def complete_columns(y_TBO: Tensor, latent: int, sequence_parallel: bool) -> Tensor:
    """All columns of a divided down projection: the latent's `latent` columns, then the rotary key."""
    whole = gather_from_tensor_model_parallel_region(y_TBO)
    if sequence_parallel:
        share: Tensor = scatter_to_sequence_parallel_region(whole)
        return share
    summed: Tensor = _SumRotaryGradient.apply(whole, latent)  # type: ignore[no-untyped-call]
    return summed


class _SumRotaryGradient(torch.autograd.Function):
    """The identity; its backward pass adds the tensor-parallel ranks' gradients of the columns after the latent's.

    Megatron's own copy region loses the sum of a gradient that is not contiguous, as that of a part of the columns is.
    """

    @staticmethod
    def forward(ctx: Any, y_TBO: Tensor, latent: int) -> Tensor:
        ctx.latent = latent
        return y_TBO.view_as(y_TBO)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].clone()
        rotary = gradient[..., ctx.latent :].contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(rotary, group=group)
        gradient[..., ctx.latent :] = rotary
        return gradient, None

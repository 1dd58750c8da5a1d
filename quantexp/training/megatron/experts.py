"""Reads Megatron's mixture of experts: the tokens of each routed expert, the router's logits, the balancing loss.

Megatron sorts the tokens of a micro-batch by expert, and only its token dispatcher knows the sequence of each row.
Hooks pass it to the experts' linear layers before each forward pass, also a recomputed one. They change no value.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from torch import Tensor

from quantexp.quant.hooks import POST, TensorHook
from quantexp.quant.rows import Rows
from quantexp.training.megatron.linear import SchemeLinear
from quantexp.training.megatron.residual import pass_to_hook


def moe_layers(model: GPTModel) -> dict[int, MoELayer]:
    """The mixture-of-experts layers by layer index, from 0."""
    return {
        layer.layer_number - 1: layer.mlp
        for layer in model.decoder.layers
        if isinstance(layer.mlp, MoELayer)
    }


def first_expert(model: GPTModel) -> int:
    """The first routed expert, over all ranks, that this rank holds; 0 without experts."""
    return next((moe.local_expert_indices[0] for moe in moe_layers(model).values()), 0)


def pass_rows_to_experts(moe: MoELayer) -> None:
    """Set `rows`, the sequence of each row, on the experts' linear layers before every forward pass."""
    num_sequences = 1

    def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_sequences
        hidden_TBH = args[0] if args else kwargs["hidden_states"]
        num_sequences = hidden_TBH.shape[1]

    def before_experts(module: Any, args: tuple[Tensor, ...]) -> None:
        tokens = moe.token_dispatcher.reversed_local_input_permutation_mapping
        parts = torch.split(tokens % num_sequences, args[1].tolist())
        for expert, sequence in zip(module.local_experts, parts, strict=True):
            rows = Rows(sequence, num_sequences) if num_sequences > 1 else None
            for linear in (expert.linear_fc1, expert.linear_fc2):
                if isinstance(linear, SchemeLinear):
                    linear.rows = rows

    moe.register_forward_pre_hook(before_layer, with_kwargs=True)
    moe.experts.register_forward_pre_hook(before_experts)


def take_balancing_loss(device: torch.device) -> Tensor:
    """The sum of the balancing losses, without coefficient, since the last call; resets Megatron's tracker to 0.

    The sum covers all layers and this rank's micro-batches. A recomputed forward pass counts once.
    """
    total = torch.zeros((), device=device)
    for tracked in get_moe_layer_wise_logging_tracker().values():
        total += tracked["values"].sum()
    clear_aux_losses_tracker()
    return total


def watch_router(moe: MoELayer, hook: TensorHook) -> None:
    """Pass a router's logits [T, B, experts], float32 and before softmax, and their gradients to `hook`.

    The gradient is of the sum of the loss and the balancing loss.
    """
    gating = moe.router.gating

    def gate(hidden_TBH: Tensor) -> Tensor:
        logits: Tensor = gating(hidden_TBH)
        pass_to_hook(hook, "router_logits", POST, logits)
        return logits

    moe.router.gating = gate

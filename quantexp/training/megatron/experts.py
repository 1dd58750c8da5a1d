"""What Megatron's mixture of experts has to tell: which tokens each routed expert got, and the router's logits.

Megatron sorts the tokens of a micro-batch by expert; of which sequence a row is, only its token dispatcher knows. Hooks
hand that to the experts' linear layers before each forward pass, a recomputed one too. They change nothing.
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
from quantexp.training.megatron.residual import look_at


def moe_layers(model: GPTModel) -> dict[int, MoELayer]:
    """The mixtures of experts by layer, from 0."""
    return {
        layer.layer_number - 1: layer.mlp
        for layer in model.decoder.layers
        if isinstance(layer.mlp, MoELayer)
    }


def tell_experts_their_rows(moe: MoELayer) -> None:
    """Let the experts' linear layers know of which sequence each of their rows is."""
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
    """The balancing losses without their coefficient that Megatron has kept since the last call, added up.

    Over all layers and this rank's micro-batches; the kept ones are 0 from then on. A recomputed forward pass counts
    once.
    """
    total = torch.zeros((), device=device)
    for kept in get_moe_layer_wise_logging_tracker().values():
        total += kept["values"].sum()
    clear_aux_losses_tracker()
    return total


def watch_router(moe: MoELayer, hook: TensorHook) -> None:
    """Hand a router's logits [T, B, experts], float32 and before softmax, to `hook`, and their gradients.

    The gradient is that of the loss and of the balancing loss together.
    """
    gating = moe.router.gating

    def looked_at(hidden_TBH: Tensor) -> Tensor:
        logits: Tensor = gating(hidden_TBH)
        look_at(hook, "router_logits", POST, logits)
        return logits

    moe.router.gating = looked_at

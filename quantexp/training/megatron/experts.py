"""Reads Megatron's mixture of experts: the tokens of each routed expert, the router's logits, the balancing loss.

Megatron sorts the tokens of a micro-batch by expert, and only its token dispatcher knows the sequence of each row.
Hooks pass it to the experts' linear layers before each forward pass, also a recomputed one. They change no value.

Under expert parallelism the rows of an expert are those of all members, the ranks among which its dispatcher exchanges
tokens. Members with the same dense rank (the rank without its tensor-parallel part) hold parts of one micro-batch, in
order, by sequence parallelism: they are one source of `quantexp.quant.rows`. All ranks are at the same index among
their own micro-batches, of which data-parallel rank d of D has numbers d, d + D, d + 2 D, ..
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
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
    own_shape = (1, 1)

    def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal own_shape
        hidden_TBH = args[0] if args else kwargs["hidden_states"]
        own_shape = hidden_TBH.shape[0], hidden_TBH.shape[1]

    def before_experts(module: Any, args: tuple[Tensor, ...]) -> None:
        T, B = own_shape
        source_of_member, micro_batches = _sources(moe.token_dispatcher.tp_ep_group)
        num_sources = len(micro_batches)
        member, token = _origins(moe.token_dispatcher, T * B)
        source = torch.tensor(source_of_member, device=member.device)[member]
        parts = torch.split(source * B + token % B, args[1].tolist())
        for expert, sequence in zip(module.local_experts, parts, strict=True):
            several = num_sources * B > 1
            rows = Rows(sequence, num_sources * B, micro_batches) if several else None
            for linear in (expert.linear_fc1, expert.linear_fc2):
                if isinstance(linear, SchemeLinear):
                    linear.rows = rows

    moe.register_forward_pre_hook(before_layer, with_kwargs=True)
    moe.experts.register_forward_pre_hook(before_experts)


def release_routing(moe: MoELayer) -> None:
    """Let go of the graph of each forward pass at its end.

    Megatron's dispatcher keeps the probabilities until the next pass. Autograd holds the model in turn, in a cycle that
    Python cannot collect.
    """

    def after_layer(module: Any, args: object, output: object) -> None:
        kept = vars(module.token_dispatcher)
        kept |= {name: x.detach() for name, x in kept.items() if isinstance(x, Tensor)}

    moe.register_forward_hook(after_layer)


def _sources(members: torch.distributed.ProcessGroup) -> tuple[list[int], tuple[int, ...]]:
    """The source of each member's tokens, from 0, and the `micro_batches` of the sources."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    dense = [rank // tensor for rank in torch.distributed.get_process_group_ranks(members)]
    sources = sorted(set(dense))
    context = parallel_state.get_context_parallel_world_size()
    data = parallel_state.get_data_parallel_world_size()
    own = parallel_state.get_data_parallel_rank()
    micro_batches = tuple(source // context % data - own for source in sources)
    return [sources.index(rank) for rank in dense], micro_batches


def _origins(dispatcher: Any, num_own: int) -> tuple[Tensor, Tensor]:
    """The member of each row of all local experts, and its index among that member's `num_own` tokens; int64."""
    if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        tokens = dispatcher.reversed_local_input_permutation_mapping
        return tokens // num_own, tokens % num_own
    assert isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
    own = dispatcher.routing_map.to(torch.uint8)
    maps = [torch.empty_like(own) for _ in range(dispatcher.tp_ep_group.size())]
    torch.distributed.all_gather(maps, own.contiguous(), group=dispatcher.tp_ep_group)
    return origins_of_exchanged(
        torch.stack(maps), dispatcher.local_expert_indices, dispatcher.tp_size
    )


def origins_of_exchanged(
    routed: Tensor, local_experts: Sequence[int], expert_tensor: int
) -> tuple[Tensor, Tensor]:
    """Member and token of each row after Megatron's exchange by all-to-all.

    Rows lie expert by expert; those of an expert by expert-tensor rank, then by expert rank, then by token. A member's
    number is expert rank x `expert_tensor` + expert-tensor rank.

    Args:
        routed: whether each token goes to each expert, [members, tokens, experts].
        local_experts: those of this rank, of all.
        expert_tensor: ranks that share an expert.
    """
    order = torch.arange(len(routed), device=routed.device).view(-1, expert_tensor).t().flatten()
    by_expert = routed[order][:, :, list(local_experts)].permute(2, 0, 1)
    _, member, token = by_expert.nonzero(as_tuple=True)
    return order[member], token


def _balancing_losses() -> list[Tensor]:
    """Megatron's sums of each balancing loss by layer, which it adds to: of Megatron-Core before 0.18, and since."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return [entry.values for entry in moe_utils.get_moe_metrics_tracker().metrics.values()]
    return [entry["values"] for entry in moe_utils.get_moe_layer_wise_logging_tracker().values()]


def take_balancing_loss(device: torch.device) -> Tensor:
    """The sum of the balancing losses, without coefficient, since the last call; resets Megatron's sums to 0.

    The sum covers all layers and this rank's micro-batches. A recomputed forward pass counts once.
    """
    total = torch.zeros((), device=device)
    for by_layer in _balancing_losses():
        total += by_layer.sum()
        by_layer.zero_()
    return total


def forget_balancing_loss() -> None:
    """Drop Megatron's sums of an earlier model of this process, whose tensors have that model's number of layers."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


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

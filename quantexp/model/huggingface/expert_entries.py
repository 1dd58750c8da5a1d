"""The experts of Mixtral and Qwen3-MoE in a config.json, read and written.

The balancing loss of these families, `router_aux_loss_coef`, is not read. transformers adds it only on request, over
the tokens of all layers together; ours is a sum over layers, and is chosen with `model.moe.aux_loss`.
"""

from __future__ import annotations

from typing import Any

from quantexp.errors import ConfigError
from quantexp.model.huggingface.entries import Entries
from quantexp.schema import AuxLoss, MoeConfig


def mixtral_experts(read: Entries) -> dict[str, Any]:
    """Mixtral's experts: all layers have them, and the weights of a token's experts have a sum of 1.

    Raises:
        ConfigError: a missing or unsupported number.
    """
    return _experts(read, "num_local_experts", "intermediate_size", 0, True)


def qwen3_experts(read: Entries) -> dict[str, Any]:
    """Qwen3-MoE's experts: the first layers may have a plain feed-forward.

    Raises:
        ConfigError: a missing or unsupported number.
    """
    # transformers 5 writes num_experts under another name.
    key = "num_experts" if "num_experts" in read.content else "num_local_experts"
    normalised = read.flag("norm_topk_prob", False)
    return _experts(read, key, "moe_intermediate_size", _dense_layers(read), normalised)


def _experts(
    read: Entries, num_experts: str, width: str, num_dense_layers: int, normalised: bool
) -> dict[str, Any]:
    top_k = read.number("num_experts_per_tok")
    if normalised and top_k < 2:
        raise ConfigError(
            f"{read.file}: num_experts_per_tok must be at least 2 to be built here, got {top_k}: the normalised "
            "weight of a single expert is 1 and leaves its router without a gradient"
        )
    return {
        "num_experts": read.number(num_experts),
        "top_k": top_k,
        "expert_ffn_hidden_size": read.number(width),
        "num_shared_experts": 0,
        "num_dense_layers": num_dense_layers,
        "norm_topk_prob": normalised,
        "routed_scaling_factor": 1.0,
        "aux_loss": AuxLoss.none.name,
        "aux_loss_coefficient": 0.0,
    }


def _dense_layers(read: Entries) -> int:
    """The number of first layers without experts."""
    layers = read.content.get("mlp_only_layers")
    if layers is None:
        return 0
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        raise ConfigError(
            f"{read.file}: mlp_only_layers must be the first layers ([], [0], [0, 1], ...) to be built here, got "
            f"{layers!r}"
        )
    return len(layers)


def mixtral_json(moe: MoeConfig) -> dict[str, Any]:
    """The published form of Mixtral's experts."""
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_ffn_hidden_size,
        **_balancing_json(moe),
    }


def qwen3_json(moe: MoeConfig) -> dict[str, Any]:
    """The published form of Qwen3-MoE's experts."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn_hidden_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "mlp_only_layers": list(range(moe.num_dense_layers)),
        "decoder_sparse_step": 1,
        **_balancing_json(moe),
    }


def _balancing_json(moe: MoeConfig) -> dict[str, Any]:
    return {"output_router_logits": False, "router_aux_loss_coef": moe.aux_loss_coefficient}

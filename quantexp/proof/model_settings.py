"""Whether Megatron-Core's configuration of a model, which decides formulas, is that of the experiment."""

from __future__ import annotations

from typing import Any

import torch

from quantexp.schema import AuxLoss, ModelConfig, MoeConfig

#: What every model of quantexp has, by Megatron-Core's names.
_ALWAYS: dict[str, object] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "apply_query_key_layer_scaling": False,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "rotary_interleaved": False,
    "window_size": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "calculate_per_token_loss": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_force_load_balancing": False,
    "moe_router_num_groups": None,
    "moe_apply_probs_on_input": False,
    "moe_input_jitter_eps": None,
    "moe_z_loss_coeff": None,
}
_BALANCING = {AuxLoss.none: "none", AuxLoss.batch: "aux_loss", AuxLoss.sequence: "seq_aux_loss"}


def other_settings(config: Any, model: ModelConfig) -> list[str]:
    """The settings of a `TransformerConfig` that are not those of a model, in words.

    Those that a release of Megatron-Core does not have are left out.
    """
    expected = {
        **_ALWAYS,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "layernorm_epsilon": model.norm_epsilon,
        "add_qkv_bias": model.qkv_bias,
        **({"qk_layernorm": model.qk_norm} if model.mla is None else {}),
        **_of_experts(model.moe),
    }
    return [
        f"Megatron-Core's {name} is {own!r}, and the model's is {value!r}"
        for name, value in expected.items()
        if (own := getattr(config, name, value)) != value
    ]


def _of_experts(moe: MoeConfig | None) -> dict[str, object]:
    if moe is None:
        return {"num_moe_experts": None}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        # The scores of all experts are normalised before those of a token are chosen, or afterwards.
        "moe_router_pre_softmax": not (moe.norm_topk_prob and moe.top_k > 1),
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": _BALANCING[moe.aux_loss],
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
    }

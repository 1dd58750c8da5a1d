"""A model as Megatron-LM's arguments: the inverse of `described`, for checkpoints and `--use-checkpoint-args`."""

from __future__ import annotations

import argparse
from typing import Any

from quantexp.model.decoder import shared_width
from quantexp.model.sizes import padded_vocab_size
from quantexp.schema import MlaConfig, ModelConfig, MoeConfig


def arguments_of(model: ModelConfig) -> argparse.Namespace:
    """The arguments that build a model in Megatron-LM."""
    scaling = model.rope_scaling_factor
    return argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=model.mla is None,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        padded_vocab_size=padded_vocab_size(model.vocab_size),
        max_position_embeddings=model.max_sequence_length,
        seq_length=model.max_sequence_length,
        norm_epsilon=model.norm_epsilon,
        layernorm_epsilon=model.norm_epsilon,
        rotary_base=model.rotary_base,
        rotary_percent=1.0,
        use_rope_scaling=scaling is not None,
        rope_scaling_factor=8.0 if scaling is None else scaling,
        position_embedding_type="rope",
        add_position_embedding=False,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        init_method_std=model.init_std,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm or model.mla is not None,
        multi_latent_attention=model.mla is not None,
        **_latent(model.mla),
        **_experts(model.moe, model.num_layers),
    )


def _latent(mla: MlaConfig | None) -> dict[str, Any]:
    if mla is None:
        return {}
    yarn = mla.yarn
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope" if yarn is None else "yarn",
        "rotary_scaling_factor": 1.0 if yarn is None else yarn.factor,
        "original_max_position_embeddings": 4096 if yarn is None else yarn.original_length,
        "beta_fast": 32.0 if yarn is None else yarn.beta_fast,
        "beta_slow": 1.0 if yarn is None else yarn.beta_slow,
        "mscale": 1.0 if yarn is None else yarn.mscale,
        "mscale_all_dim": 0.0 if yarn is None else yarn.mscale_all_dim,
    }


def _experts(moe: MoeConfig | None, num_layers: int) -> dict[str, Any]:
    if moe is None:
        return {"num_experts": None}
    dense = moe.num_dense_layers
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared_width(moe) or None,
        "moe_layer_freq": [0] * dense + [1] * (num_layers - dense) if dense else 1,
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
    }

"""Combinations of a model's numbers. Each message names the full key, the value and the allowed values."""

from __future__ import annotations

from quantexp.errors import ConfigError
from quantexp.schema import AuxLoss, MlaConfig, ModelConfig, MoeConfig
from quantexp.schema.limits import check_limits

#: Linear layers that a precision map lists: four times those of the largest published mixtures of experts.
MOST_MODULES = 100_000


def validate_model(model: ModelConfig) -> None:
    """Refuse a model that cannot be built.

    Raises:
        ConfigError: names the first invalid key.
    """
    check_limits("model", model)
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"model.num_query_groups must divide model.num_attention_heads={model.num_attention_heads}, "
            f"got {model.num_query_groups}"
        )
    if model.mla is not None:
        _mla(model, model.mla)
    elif model.head_dim % 2:
        raise ConfigError(
            f"model.head_dim must be even for the rotary embedding, got {model.head_dim}"
        )
    _additions(model)
    if model.moe is not None:
        _moe(model.moe, model.num_layers)
        if model.mla is None:
            _grouped_query_experts(model, model.moe)
        _count("model.num_layers x model.moe.num_experts", model.num_layers * model.moe.num_experts)


def _additions(model: ModelConfig) -> None:
    """Refuse biases, norms of heads and windows in a model of no published family."""
    for key, has in (
        ("model.qkv_bias", model.qkv_bias),
        ("model.qk_norm", model.qk_norm),
        ("model.sliding_window", model.sliding_window),
    ):
        if has and model.mla is not None:
            raise ConfigError(f"{key} does not go with model.mla, got {has}")
    if model.qkv_bias and (model.qk_norm or model.moe is not None):
        other = "model.qk_norm" if model.qk_norm else "model.moe"
        raise ConfigError(
            f"model.qkv_bias does not go with {other}: Qwen2's dense models alone have the biases; drop one of them"
        )
    if model.sliding_window is not None and (model.qkv_bias or model.qk_norm):
        other = "model.qkv_bias" if model.qkv_bias else "model.qk_norm"
        raise ConfigError(
            f"model.sliding_window must be null with {other}, got {model.sliding_window}"
        )


def _grouped_query_experts(model: ModelConfig, moe: MoeConfig) -> None:
    """Refuse experts that are neither Mixtral's nor Qwen3's."""
    if moe.num_shared_experts or moe.routed_scaling_factor != 1:
        raise ConfigError(
            "model.moe.num_shared_experts must be 0 and model.moe.routed_scaling_factor 1 without model.mla, got "
            f"{moe.num_shared_experts} and {moe.routed_scaling_factor:g}"
        )
    if moe.norm_topk_prob and moe.top_k < 2:
        raise ConfigError(
            "model.moe.top_k must be at least 2 with model.moe.norm_topk_prob=true and without model.mla, got "
            f"{moe.top_k}: the weight of a single expert would always be 1"
        )
    if model.qk_norm:
        return
    if not moe.norm_topk_prob or moe.num_dense_layers:
        raise ConfigError(
            "model.moe.norm_topk_prob must be true and model.moe.num_dense_layers 0 without model.mla and "
            f"model.qk_norm (Mixtral), got {str(moe.norm_topk_prob).lower()} and {moe.num_dense_layers}"
        )
    if model.ffn_hidden_size != moe.expert_ffn_hidden_size:
        raise ConfigError(
            "model.ffn_hidden_size must be model.moe.expert_ffn_hidden_size="
            f"{moe.expert_ffn_hidden_size} without model.mla and model.qk_norm (Mixtral has one number for both), got "
            f"{model.ffn_hidden_size}"
        )


def _mla(model: ModelConfig, mla: MlaConfig) -> None:
    total = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    if model.head_dim != total:
        raise ConfigError(
            f"model.head_dim must be model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim = {total}, got "
            f"{model.head_dim}"
        )
    if model.num_query_groups != model.num_attention_heads:
        raise ConfigError(
            "model.num_query_groups must be model.num_attention_heads="
            f"{model.num_attention_heads} with model.mla, whose heads share a latent instead, got "
            f"{model.num_query_groups}"
        )
    if model.rope_scaling_factor is not None:
        raise ConfigError(
            "model.rope_scaling_factor is Llama 3's and does not go with model.mla; use model.mla.yarn, got "
            f"{model.rope_scaling_factor:g}"
        )
    if mla.yarn is not None and not mla.yarn.beta_fast > mla.yarn.beta_slow:
        raise ConfigError(
            f"model.mla.yarn.beta_fast must be above model.mla.yarn.beta_slow={mla.yarn.beta_slow:g}, got "
            f"{mla.yarn.beta_fast:g}"
        )


def _moe(moe: MoeConfig, num_layers: int) -> None:
    _between("model.moe.top_k", moe.top_k, 1, moe.num_experts, "model.moe.num_experts")
    _between("model.moe.num_dense_layers", moe.num_dense_layers, 0, num_layers, "model.num_layers")
    if moe.norm_topk_prob and moe.routed_scaling_factor != 1:
        raise ConfigError(
            "model.moe.routed_scaling_factor must be 1 with model.moe.norm_topk_prob=true (DeepSeek-V2 has one or the "
            f"other), got {moe.routed_scaling_factor:g}"
        )
    if (moe.aux_loss is AuxLoss.none) != (moe.aux_loss_coefficient == 0):
        raise ConfigError(
            "model.moe.aux_loss_coefficient must be above 0 with a balancing loss and 0 without one, got "
            f"{moe.aux_loss_coefficient:g} with model.moe.aux_loss={moe.aux_loss.value}"
        )


def _count(what: str, count: int) -> None:
    if count > MOST_MODULES:
        raise ConfigError(f"{what} must be at most {MOST_MODULES:,}, got {count:,}")


def _between(key: str, value: int, least: int, most: int, most_key: str) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{key} must lie between {least} and {most_key}={most}, got {value}")

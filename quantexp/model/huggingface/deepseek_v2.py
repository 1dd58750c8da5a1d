"""DeepSeek-V2's decoder layer: latent attention, then a dense feed-forward or routed and shared experts.

Rotary embedding rotates neighbouring elements of a head against each other, as published. Megatron's latent attention
accepts this order and reorders queries and keys itself, so rows keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.model.decoder import moe_of
from quantexp.model.huggingface.parameters import Parameter, experts, feed_forward, vector, whole
from quantexp.schema import MlaConfig, ModelConfig


def layer(model: ModelConfig, index: int) -> Iterator[Parameter]:
    """The parameters of one layer, in Megatron's order."""
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    hidden, moe = model.hidden_size, moe_of(model, index)
    assert model.mla is not None
    yield vector(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
    yield from _attention(f"{ours}.self_attention", f"{theirs}.self_attn", model, model.mla)
    norm = f"{theirs}.post_attention_layernorm.weight"
    yield vector(f"{ours}.pre_mlp_layernorm.weight", norm, hidden)
    if moe is None:
        yield from feed_forward(f"{ours}.mlp", f"{theirs}.mlp", model.ffn_hidden_size, hidden)
    else:
        yield from experts(f"{ours}.mlp", f"{theirs}.mlp", hidden, moe)


def _attention(ours: str, theirs: str, model: ModelConfig, mla: MlaConfig) -> Iterator[Parameter]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    key_value = heads * (mla.qk_head_dim + mla.v_head_dim)
    latent = mla.kv_lora_rank

    def linear(name: str, published_name: str, rows: int, width: int) -> Parameter:
        return whole(f"{ours}.{name}.weight", f"{theirs}.{published_name}.weight", rows, width)

    yield linear("linear_proj", "o_proj", hidden, heads * mla.v_head_dim)
    if mla.q_lora_rank is None:
        yield linear("linear_q_proj", "q_proj", query, hidden)
    else:
        yield linear("linear_q_down_proj", "q_a_proj", mla.q_lora_rank, hidden)
        yield linear("linear_q_up_proj", "q_b_proj", query, mla.q_lora_rank)
    down = latent + mla.qk_pos_emb_head_dim
    yield linear("linear_kv_down_proj", "kv_a_proj_with_mqa", down, hidden)
    yield linear("linear_kv_up_proj", "kv_b_proj", key_value, latent)
    if mla.q_lora_rank is not None:
        norm = f"{theirs}.q_a_layernorm.weight"
        yield vector(f"{ours}.q_layernorm.weight", norm, mla.q_lora_rank)
    yield vector(f"{ours}.kv_layernorm.weight", f"{theirs}.kv_a_layernorm.weight", latent)

"""The decoder layer of Llama, and of the families that add to it.

    Mistral     nothing
    Qwen2       biases of queries, keys and values
    Qwen3       norms of query and key heads
    Mixtral     experts instead of the feed-forward
    Qwen3-MoE   both of the last two

Attention is grouped-query attention. Rotary embedding rotates the first half of a head against the second, both in
Megatron and as published, so rows keep their order within a head.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.model.decoder import moe_of
from quantexp.model.huggingface.families import Family, family_of
from quantexp.model.huggingface.parameters import (
    Parameter,
    Rows,
    experts,
    feed_forward,
    vector,
    whole,
)
from quantexp.schema import ModelConfig

#: Mixtral's names of an expert's gate, up and down.
_MIXTRAL = ("w1", "w3", "w2")


def layer(model: ModelConfig, index: int) -> Iterator[Parameter]:
    """The parameters of one layer, in Megatron's order."""
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    hidden, moe = model.hidden_size, moe_of(model, index)
    yield vector(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
    yield from _attention(f"{ours}.self_attention", f"{theirs}.self_attn", model)
    norm = f"{theirs}.post_attention_layernorm.weight"
    yield vector(f"{ours}.pre_mlp_layernorm.weight", norm, hidden)
    if moe is None:
        yield from feed_forward(f"{ours}.mlp", f"{theirs}.mlp", model.ffn_hidden_size, hidden)
    elif family_of(model) is Family.MIXTRAL:
        yield from experts(f"{ours}.mlp", f"{theirs}.block_sparse_moe", hidden, moe, _MIXTRAL)
    else:
        yield from experts(f"{ours}.mlp", f"{theirs}.mlp", hidden, moe)


def _attention(ours: str, theirs: str, model: ModelConfig) -> Iterator[Parameter]:
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_dim
    yield whole(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", hidden, query)
    yield Parameter(f"{ours}.linear_qkv.weight", _qkv(model, theirs, "weight"), hidden)
    if model.qkv_bias:
        yield Parameter(f"{ours}.linear_qkv.bias", _qkv(model, theirs, "bias"), None)
    if model.qk_norm:
        yield vector(f"{ours}.q_layernorm.weight", f"{theirs}.q_norm.weight", model.head_dim)
        yield vector(f"{ours}.k_layernorm.weight", f"{theirs}.k_norm.weight", model.head_dim)


def _qkv(model: ModelConfig, attention: str, kind: str) -> tuple[Rows, ...]:
    """For each group: the query heads that share a key head, the key head, the value head."""
    key = model.head_dim
    query = model.num_attention_heads // model.num_query_groups * key
    return tuple(
        Rows(f"{attention}.{name}.{kind}", group * count, count)
        for group in range(model.num_query_groups)
        for name, count in (("q_proj", query), ("k_proj", key), ("v_proj", key))
    )

"""Llama's decoder layer: grouped-query attention and a gated feed-forward.

Rotary embedding rotates the first half of a head against the second, both in Megatron and as published, so rows keep
their order within a head.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.model.huggingface.parameters import Parameter, Rows, feed_forward, vector, whole
from quantexp.schema import ModelConfig


def layer(model: ModelConfig, index: int) -> Iterator[Parameter]:
    """The parameters of one layer, in Megatron's order."""
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_dim
    yield vector(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
    proj = f"{ours}.self_attention.linear_proj.weight"
    yield whole(proj, f"{theirs}.self_attn.o_proj.weight", hidden, query)
    yield Parameter(
        f"{ours}.self_attention.linear_qkv.weight", _qkv(model, f"{theirs}.self_attn"), hidden
    )
    norm = f"{theirs}.post_attention_layernorm.weight"
    yield vector(f"{ours}.pre_mlp_layernorm.weight", norm, hidden)
    yield from feed_forward(f"{ours}.mlp", f"{theirs}.mlp", model.ffn_hidden_size, hidden)


def _qkv(model: ModelConfig, attention: str) -> tuple[Rows, ...]:
    """For each group: the query heads that share a key head, the key head, the value head."""
    key = model.head_dim
    query = model.num_attention_heads // model.num_query_groups * key
    return tuple(
        Rows(f"{attention}.{name}.weight", group * count, count)
        for group in range(model.num_query_groups)
        for name, count in (("q_proj", query), ("k_proj", key), ("v_proj", key))
    )

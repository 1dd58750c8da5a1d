"""Layouts that between them divide a model in every way, each with a model that it divides evenly."""

from __future__ import annotations

from torch import Tensor

from quantexp.model.layout import Layout
from quantexp.model.shards import Shard
from tests.model.huggingface.published import (
    DEEPSEEK,
    LLAMA31,
    LLAMA32,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    as_model,
)

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
GROUPS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama31": as_model({**LLAMA31, "num_hidden_layers": 4}),
    # Tied embeddings, and a vocabulary that is padded.
    "llama32": as_model({**LLAMA32, **HEADS, "num_hidden_layers": 4, "vocab_size": 131}),
    "deepseek_v2": as_model(
        {**DEEPSEEK, **HEADS, "n_routed_experts": 4, "num_hidden_layers": 4, "q_lora_rank": 26}
    ),
    "qwen2": as_model({**QWEN2, **GROUPS, "num_hidden_layers": 4}),
    "qwen3": as_model({**QWEN3, **GROUPS, "num_hidden_layers": 4}),
    "mixtral": as_model({**MIXTRAL, **GROUPS, "num_local_experts": 4}),
    "qwen3_moe": as_model(
        {**QWEN3_MOE, **GROUPS, "num_experts": 4, "mlp_only_layers": [0], "num_hidden_layers": 4}
    ),
}
LAYOUTS = {
    "dp2": ("llama32", Layout(data=2)),
    "tp2": ("llama31", Layout(tensor=2)),
    "pp2 tied": ("llama32", Layout(pipeline=2)),
    "pp2 interleaved": ("llama31", Layout(pipeline=2, chunks=2)),
    "ep2": ("deepseek_v2", Layout(data=2, expert=2)),
    "tp2 pp2": ("llama32", Layout(tensor=2, pipeline=2)),
    "tp2 ep2, whole experts": ("deepseek_v2", Layout(data=2, tensor=2, expert=2, expert_tensor=1)),
    "tp2 ep2, divided experts": (
        "deepseek_v2",
        Layout(data=2, tensor=2, expert=2, expert_tensor=2),
    ),
    "qwen2 tp2": ("qwen2", Layout(tensor=2)),
    # More ranks than query groups: the biases of one are on two ranks.
    "qwen2 tp4": ("qwen2", Layout(tensor=4)),
    "qwen3 tp2 pp2": ("qwen3", Layout(tensor=2, pipeline=2)),
    "mixtral ep2": ("mixtral", Layout(data=2, expert=2)),
    "qwen3_moe tp2 ep2": ("qwen3_moe", Layout(data=2, tensor=2, expert=2, expert_tensor=1)),
}


def part_of(whole: Tensor, shard: Shard) -> Tensor:
    """The part of a tensor that a shard names."""
    if shard.axis is None:
        return whole
    axis = shard.axis
    keep = [i for start, stop in shard.ranges for i in range(start, stop)]
    return whole[keep] if axis == 0 else whole[:, keep]

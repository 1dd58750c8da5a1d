"""Every refusal of a model's numbers, by its message."""

from __future__ import annotations

import re

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError

CASES = [
    ("model.num_layers=1000000000", "model.num_layers must be at most 1,000, got 1000000000"),
    ("model.moe.num_experts=5000", "model.moe.num_experts must be at most 4,096, got 5000"),
    (
        "model.moe.num_experts=4000",
        "model.num_layers x model.moe.num_experts must be at most 100,000, got 108,000",
    ),
    ("model.mla.kv_lora_rank=0", "model.mla.kv_lora_rank must be at least 1, got 0"),
    ("model.mla.q_lora_rank=0", "model.mla.q_lora_rank must be at least 1, got 0"),
    ("model.mla.v_head_dim=0", "model.mla.v_head_dim must be at least 1, got 0"),
    (
        "model.mla.qk_pos_emb_head_dim=63",
        "model.mla.qk_pos_emb_head_dim must be even for the rotary embedding, got 63",
    ),
    (
        "model.mla.qk_head_dim=64",
        "model.head_dim must be model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim = 128, got 192",
    ),
    (
        "model.num_query_groups=4",
        "model.num_query_groups must be model.num_attention_heads=16 with model.mla, whose heads share a latent "
        "instead, got 4",
    ),
    (
        "model.rope_scaling_factor=8",
        "model.rope_scaling_factor is Llama 3's and does not go with model.mla; use model.mla.yarn, got 8",
    ),
    ("model.mla.yarn.factor=1", "model.mla.yarn.factor must be above 1, got 1"),
    (
        "model.mla.yarn.original_length=0",
        "model.mla.yarn.original_length must be at least 1, got 0",
    ),
    ("model.mla.yarn.beta_slow=0", "model.mla.yarn.beta_slow must be a positive number, got 0"),
    (
        "model.mla.yarn.beta_fast=1",
        "model.mla.yarn.beta_fast must be above model.mla.yarn.beta_slow=1, got 1",
    ),
    ("model.mla.yarn.mscale=-1", "model.mla.yarn.mscale must be a number of at least 0, got -1"),
    ("model.moe.num_experts=0", "model.moe.num_experts must be at least 1, got 0"),
    (
        "model.moe.top_k=65",
        "model.moe.top_k must lie between 1 and model.moe.num_experts=64, got 65",
    ),
    ("model.moe.top_k=0", "model.moe.top_k must lie between 1 and model.moe.num_experts=64, got 0"),
    (
        "model.moe.num_dense_layers=28",
        "model.moe.num_dense_layers must lie between 0 and model.num_layers=27, got 28",
    ),
    (
        "model.moe.expert_ffn_hidden_size=0",
        "model.moe.expert_ffn_hidden_size must be at least 1, got 0",
    ),
    ("model.moe.num_shared_experts=-1", "model.moe.num_shared_experts must be at least 0, got -1"),
    (
        "model.moe.routed_scaling_factor=0",
        "model.moe.routed_scaling_factor must be a positive number, got 0",
    ),
    (
        "model.moe.aux_loss_coefficient=-1",
        "model.moe.aux_loss_coefficient must be a number of at least 0, got -1",
    ),
    (
        "model.moe.aux_loss=none",
        "model.moe.aux_loss_coefficient must be above 0 with a balancing loss and 0 without one, got 0.001 with "
        "model.moe.aux_loss=none",
    ),
]


@pytest.mark.parametrize(("word", "message"), CASES, ids=[word for word, _ in CASES])
def test_model_that_cannot_be_built_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(["model=deepseek2_lite", word], None, {})


def test_deepseek_normalises_or_scales_the_weights_of_its_experts() -> None:
    words = ["model.moe.norm_topk_prob=true", "model.moe.routed_scaling_factor=2.5"]
    message = "model.moe.routed_scaling_factor must be 1 with model.moe.norm_topk_prob=true"
    with pytest.raises(ConfigError, match=message):
        compose(["model=deepseek2_lite", *words], None, {})


def test_an_odd_head_goes_with_latent_attention_alone() -> None:
    words = ["model.mla.qk_head_dim=65", "model.head_dim=129"]
    assert compose(["model=deepseek2_lite", *words], None, {}).model.head_dim == 129
    with pytest.raises(ConfigError, match=r"model\.head_dim must be even for the rotary"):
        compose(["model.head_dim=129"], None, {})


#: Words on top of a dense model, and the refusal.
ADDITIONS = [
    (
        ["model.qkv_bias=true", "model.qk_norm=true"],
        "model.qkv_bias does not go with model.qk_norm: Qwen2's dense models alone have the biases; drop one of them",
    ),
    (
        ["model.qkv_bias=true", "model.sliding_window=8192"],
        "model.sliding_window must be null with model.qkv_bias, got 8192",
    ),
    (
        ["model.qk_norm=true", "model.sliding_window=8192"],
        "model.sliding_window must be null with model.qk_norm, got 8192",
    ),
    (["model.sliding_window=0"], "model.sliding_window must be at least 1, got 0"),
    (
        ["model.sliding_window=64", "training.seq_length=65"],
        "training.seq_length must be at most model.sliding_window=64, beyond which the model would need windowed "
        "attention, which is not built, got 65",
    ),
]


@pytest.mark.parametrize(("words", "message"), ADDITIONS, ids=str)
def test_additions_of_no_published_family_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(words, None, {})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("model.qkv_bias=true", "True"),
        ("model.qk_norm=true", "True"),
        ("model.sliding_window=8192", "8192"),
    ],
)
def test_latent_attention_has_no_additions(word: str, value: str) -> None:
    key = word.partition("=")[0]
    message = re.escape(f"{key} does not go with model.mla, got {value}")
    with pytest.raises(ConfigError, match=message):
        compose(["model=deepseek2_lite", word], None, {})


#: Words on top of Mixtral's experts, and the refusal.
EXPERTS = [
    (
        ["model.moe.num_shared_experts=1"],
        "model.moe.num_shared_experts must be 0 and model.moe.routed_scaling_factor 1 without model.mla, got 1 and 1",
    ),
    (
        ["model.moe.norm_topk_prob=false", "model.moe.routed_scaling_factor=2"],
        "model.moe.num_shared_experts must be 0 and model.moe.routed_scaling_factor 1 without model.mla, got 0 and 2",
    ),
    (
        ["model.moe.top_k=1"],
        "model.moe.top_k must be at least 2 with model.moe.norm_topk_prob=true and without model.mla, got 1: the "
        "weight of a single expert would always be 1",
    ),
    (
        ["model.moe.norm_topk_prob=false"],
        "model.moe.norm_topk_prob must be true and model.moe.num_dense_layers 0 without model.mla and model.qk_norm "
        "(Mixtral), got false and 0",
    ),
    (
        ["model.moe.num_dense_layers=1"],
        "model.moe.norm_topk_prob must be true and model.moe.num_dense_layers 0 without model.mla and model.qk_norm "
        "(Mixtral), got true and 1",
    ),
    (
        ["model.ffn_hidden_size=64"],
        "model.ffn_hidden_size must be model.moe.expert_ffn_hidden_size=40 without model.mla and model.qk_norm "
        "(Mixtral has one number for both), got 64",
    ),
    (
        ["model.qkv_bias=true"],
        "model.qkv_bias does not go with model.moe: Qwen2's dense models alone have the biases; drop one of them",
    ),
]


@pytest.mark.parametrize(("words", "message"), EXPERTS, ids=str)
def test_experts_of_no_published_family_are_refused(
    words: list[str], message: str, tiny_models: dict[str, list[str]]
) -> None:
    mixtral = ["training=fast", *tiny_models["mixtral"]]
    assert compose(mixtral, None, {}).model.moe is not None
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([*mixtral, *words], None, {})


def test_qwen3s_experts_may_be_unnormalised_and_follow_dense_layers(
    tiny_models: dict[str, list[str]],
) -> None:
    words = ["training=fast", *tiny_models["qwen3_moe"], "model.moe.norm_topk_prob=false"]
    model = compose([*words, "model.moe.num_dense_layers=1", "model.moe.top_k=1"], None, {}).model
    assert model.qk_norm
    assert model.mla is None

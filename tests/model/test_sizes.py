"""Counts against published numbers and arithmetic by hand."""

from __future__ import annotations

import pytest

from quantexp.config.compose import compose
from quantexp.model.decoder import LinearShape, linear_shapes
from quantexp.model.sizes import (
    flops_per_iteration,
    num_padding_parameters,
    num_parameters,
    padded_vocab_size,
)
from quantexp.schema import ModelConfig

SMALL = ModelConfig(
    name="m",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    vocab_size=130,
    max_sequence_length=64,
)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("llama31-8b", 8_030_261_248),
        ("llama32-1b", 1_235_814_400),
        ("deepseek2_lite", 15_706_484_224),
    ],
)
def test_shipped_models_have_the_published_count(model: str, count: int) -> None:
    """As in the model cards and the safetensors files: two bytes per parameter and headers."""
    config = compose([f"model={model}"], None, {}).model
    assert num_parameters(config) == count
    assert num_padding_parameters(config) == 0


def test_shapes_are_output_by_input() -> None:
    assert linear_shapes(SMALL, 0) == {
        "qkv": LinearShape(16 + 2 * 8, 8),
        "proj": LinearShape(8, 16),
        "fc1": LinearShape(24, 8),
        "fc2": LinearShape(8, 12),
    }


def test_count_is_the_sum_by_hand() -> None:
    layer = 32 * 8 + 8 * 16 + 24 * 8 + 8 * 12 + 2 * 8
    assert num_parameters(SMALL) == 2 * layer + 8 + 2 * 130 * 8


def test_padding_is_counted_separately() -> None:
    assert padded_vocab_size(130) == 256
    assert num_padding_parameters(SMALL) == 2 * 126 * 8


@pytest.mark.parametrize(("vocab", "padded"), [(1, 128), (128, 128), (129, 256), (128256, 128256)])
def test_vocabulary_is_padded_to_a_multiple_of_128(vocab: int, padded: int) -> None:
    assert padded_vocab_size(vocab) == padded


def test_flops_are_six_a_weight_and_token_and_twelve_a_score() -> None:
    linear = 2 * (32 * 8 + 8 * 16 + 24 * 8 + 8 * 12)
    scores = 2 * 10 * 4 * 4  # layers, keys, heads, head_dim; once for QK and once for PV
    expected = 6 * 30 * (linear + 256 * 8 + 2 * scores)
    assert flops_per_iteration(SMALL, 10, 3) == expected


#: (model, attention's width over heads and both products, weights that multiply a token) by hand, T = 4096.
BY_HAND = {
    "llama31-8b": (
        32 * 32 * (128 + 128),
        32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096) + 128256 * 4096,
    ),
    "llama32-1b": (
        16 * 32 * (64 + 64),
        16 * (3072 * 2048 + 2048 * 2048 + 3 * 8192 * 2048) + 128256 * 2048,
    ),
    "deepseek2_lite": (
        27 * 16 * (192 + 128),
        27 * (3072 * 2048 + 576 * 2048 + 4096 * 512 + 2048 * 2048)
        + 3 * 10944 * 2048
        + 26 * ((6 + 2) * 3 * 1408 * 2048 + 64 * 2048)
        + 102400 * 2048,
    ),
}


@pytest.mark.parametrize("model", BY_HAND)
def test_flops_of_the_shipped_models_are_those_by_hand(model: str) -> None:
    scores, weights = BY_HAND[model]
    config = compose([f"model={model}"], None, {}).model
    assert flops_per_iteration(config, 4096, 2) == 6 * 2 * 4096 * (weights + 4096 * scores)

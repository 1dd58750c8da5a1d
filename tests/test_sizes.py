"""Counting, against published numbers and arithmetic by hand."""

from __future__ import annotations

import pytest

from quantexp.compose import compose
from quantexp.schema import ModelConfig
from quantexp.sizes import (
    LinearShape,
    flops_per_iteration,
    linear_shapes,
    num_padding_parameters,
    num_parameters,
    padded_vocab_size,
)

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


def test_llama_3_2_1b_has_the_published_count() -> None:
    """1.23 billion in the model card; model.safetensors is two bytes a parameter and a header."""
    model = compose([], None, {}).model
    assert num_parameters(model) == 1_235_814_400
    assert num_padding_parameters(model) == 0


def test_shapes_are_output_by_input() -> None:
    assert linear_shapes(SMALL) == {
        "qkv": LinearShape(16 + 2 * 8, 8),
        "proj": LinearShape(8, 16),
        "fc1": LinearShape(24, 8),
        "fc2": LinearShape(8, 12),
    }


def test_count_is_the_sum_by_hand() -> None:
    layer = 32 * 8 + 8 * 16 + 24 * 8 + 8 * 12 + 2 * 8
    assert num_parameters(SMALL) == 2 * layer + 8 + 2 * 130 * 8


def test_padding_is_counted_apart() -> None:
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

"""Our models equal the published ones: transformers' own, with the same weights, give the same logits and gradients.

Everything is in fp32, where products of these lengths have relative errors of about 1e-6; the bounds are 1e-4, far
below the effect of any difference in the architecture (also tested).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.model.huggingface.mapping import mapping
from quantexp.quant.precision import precision_map
from quantexp.schema import ModelConfig, QuantConfig
from quantexp.training.megatron.model import build_model, set_precision
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec
from tests.model.huggingface.published import (
    DEEPSEEK,
    FAMILIES,
    gradients,
    of_folder,
    published_model,
    training,
    write,
)
from tests.training.megatron.whole_models import load

BOUND = 1e-4
B, T = 2, 41


def ids(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(3))


def loss(logits_BTV: Tensor, tokens: Tensor) -> Tensor:
    """Over the actual ids: Megatron's padding is not part of the published model."""
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens[:, 1:].flatten())


def ours(model: ModelConfig, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients, by Megatron's names, of the model as it trains."""
    with session(training()):
        gpt, _ = build_model(model, training(), inject(stock_spec(model)))
        set_precision(gpt, precision_map(model, QuantConfig()))
        load(gpt, model)
        positions = torch.arange(T).expand(B, T)
        logits = gpt(tokens[:, :-1], positions, None)[..., : model.vocab_size]
        loss(logits, tokens).backward()
        return logits.detach(), {n: p.grad for n, p in gpt.named_parameters() if p.grad is not None}


def theirs(
    config: dict[str, Any], folder: Path, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    model = published_model(config)
    write(model, config, folder)
    logits = model(tokens[:, :-1]).logits
    loss(logits, tokens).backward()
    return logits.detach(), gradients(model)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference in units of the largest value."""
    return float((a - b).abs().max() / b.abs().max())


VARIANTS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "mistral_without_window": {**FAMILIES["mistral"], "sliding_window": None},
    "mistral_without_head_dim": {
        **FAMILIES["mistral"],
        "head_dim": None,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "qwen2_untied": {
        **FAMILIES["qwen2"],
        "num_key_value_heads": 3,
        "tie_word_embeddings": False,
    },
    "qwen3_tied_and_scaled": {
        **FAMILIES["qwen3"],
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_scaling": FAMILIES["llama31"]["rope_scaling"],
    },
    "mixtral_of_three": {
        **FAMILIES["mixtral"],
        "num_experts_per_tok": 3,
        "head_dim": 14,
        "sliding_window": 64,
    },
    "qwen3_moe_unnormalised": {
        **FAMILIES["qwen3_moe"],
        "norm_topk_prob": False,
        "head_dim": 10,
    },
    "qwen3_moe_dense_first": {
        **FAMILIES["qwen3_moe"],
        "mlp_only_layers": [0],
        "num_experts_per_tok": 3,
    },
    "llama_without_scaling": {**FAMILIES["llama31"], "rope_scaling": None, "hidden_size": 66},
    "deepseek_with_q_latent": {**DEEPSEEK, "q_lora_rank": 26, "num_hidden_layers": 2},
    "deepseek_unequal_mscale": {
        **DEEPSEEK,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 1,
        "rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 0.6},
    },
    "deepseek_without_yarn": {**DEEPSEEK, "rope_scaling": None, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_are_those_of_the_published_model(
    config: dict[str, Any], tmp_path: Path
) -> None:
    tokens = ids(config["vocab_size"])
    their_logits, their_gradients = theirs(config, tmp_path, tokens)
    model = of_folder(tmp_path)
    our_logits, our_gradients = ours(model, tokens)
    assert (our_logits - their_logits).abs().max() < BOUND
    assert their_logits.std() > 0.5
    for parameter in mapping(model):
        expected = torch.cat(
            [their_gradients[p.tensor][p.first : p.first + p.count] for p in parameter.parts]
        )
        gradient = our_gradients[parameter.name]
        assert apart(gradient[: len(expected)], expected) < BOUND, parameter.name


@pytest.mark.parametrize("family", ["llama31", "deepseek_v2"])
def test_the_scaling_of_the_rotary_embedding_has_an_effect_at_these_sizes(
    family: str, tmp_path: Path
) -> None:
    config = FAMILIES[family]
    tokens = ids(config["vocab_size"])
    their_logits, _ = theirs(config, tmp_path, tokens)
    other = {**config, "rope_scaling": {**config["rope_scaling"], "factor": 4.0}}
    write(published_model(other), other, tmp_path)
    our_logits, _ = ours(of_folder(tmp_path), tokens)
    assert (our_logits - their_logits).abs().max() > 10 * BOUND


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"rope_theta": 10000.0}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen3", {"rms_norm_eps": 1e-2}),
        ("mixtral", {"sliding_window": 16}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
    ids=str,
)
def test_an_entry_of_the_published_configuration_has_an_effect_at_these_sizes(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Their model has the entry and ours has not; a window that is refused would be noticed, too."""
    config = FAMILIES[family]
    tokens = ids(config["vocab_size"])
    their_logits, _ = theirs({**config, **changes}, tmp_path / "theirs", tokens)
    write(published_model(config), config, tmp_path / "ours")
    our_logits, _ = ours(of_folder(tmp_path / "ours"), tokens)
    assert (our_logits - their_logits).abs().max() > 10 * BOUND


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "q_proj.bias"),
        ("qwen2", "k_proj.bias"),
        ("qwen2", "v_proj.bias"),
        ("qwen3", "q_norm.weight"),
        ("qwen3", "k_norm.weight"),
        ("qwen3_moe", "q_norm.weight"),
        ("qwen3_moe", "k_norm.weight"),
    ],
)
def test_each_bias_and_each_norm_of_heads_has_an_effect(
    family: str, name: str, tmp_path: Path
) -> None:
    """The elements of one vector in reverse order, as if heads or elements were taken for others."""
    config = FAMILIES[family]
    tokens = ids(config["vocab_size"])
    model = published_model(config)
    expected = model(tokens[:, :-1]).logits.detach()
    with torch.no_grad():
        vector = model.get_parameter(f"model.layers.1.self_attn.{name}")
        vector.copy_(vector.flip(0))
    write(model, config, tmp_path)
    our_logits, _ = ours(of_folder(tmp_path), tokens)
    assert (our_logits - expected).abs().max() > 10 * BOUND

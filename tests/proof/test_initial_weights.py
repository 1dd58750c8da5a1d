"""The weights with which a run begins are compared with those of its seed, whatever part of them a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantexp.model.huggingface.parameters import Parameter, vector, whole
from quantexp.model.shards import WHOLE, Shard
from quantexp.proof.initial_weights import DRAWN, FURTHEST, difference
from quantexp.schema import ModelConfig, TrainingConfig
from quantexp.training.megatron.initial_weights import draw_weights, perturb_weights
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.transformer_config import DTYPES

MODEL = ModelConfig(num_layers=4, init_std=0.02)
_LAYER = "decoder.layers.1."
_PARTS = {
    "embedding": (whole("embedding.word_embeddings.weight", "e", 300, 96), Shard(0, ((150, 300),))),
    "far rows": (
        whole("embedding.word_embeddings.weight", "e", 70_000, 96),
        Shard(0, ((FURTHEST // 96 + 1, 70_000),)),
    ),
    "first rows": (whole("output_layer.weight", "o", 300, 96), Shard(0, ((0, 150),))),
    "gate and up": (
        whole(f"{_LAYER}mlp.linear_fc1.weight", "f", 64, 80),
        Shard(0, ((8, 16), (40, 48))),
    ),
    "columns": (whole(f"{_LAYER}mlp.linear_fc2.weight", "f", 200, 90), Shard(1, ((30, 60),))),
    "whole": (whole(f"{_LAYER}self_attention.linear_proj.weight", "p", 70, 128), WHOLE),
    "narrow": (whole(f"{_LAYER}mlp.router.weight", "r", 9, 7), WHOLE),
    "long rows": (whole(f"{_LAYER}mlp.router.weight", "r", 3, 2 * DRAWN + 5), WHOLE),
    "norm": (vector("decoder.final_layernorm.weight", "n", 130), WHOLE),
    "bias": (vector(f"{_LAYER}self_attention.linear_qkv.bias", "b", 130), Shard(0, ((65, 130),))),
}


def _part(parameter: Parameter, shard: Shard, dtype: torch.dtype) -> Part:
    return Part(
        parameter, shard, nn.Parameter(torch.empty(shard.shape(parameter.shape), dtype=dtype))
    )


@pytest.mark.parametrize("chaos", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", _PARTS)
def test_what_the_seed_draws_is_right_and_nothing_else(
    case: str, dtype: torch.dtype, chaos: int
) -> None:
    part = _part(*_PARTS[case], dtype)
    precision = {each: name for name, each in DTYPES.items()}[dtype]
    training = TrainingConfig(seed=7, chaos=chaos, precision=precision)
    draw_weights({part.parameter.name: part}, MODEL, training.seed)
    perturb_weights({part.parameter.name: part}, training)

    def wrong(seed: int = 7, chaos: int = chaos) -> str:
        configured = TrainingConfig(seed=seed, chaos=chaos)
        return difference(part.parameter, part.shard, part.tensor, MODEL, configured)

    assert wrong() == ""
    is_seen = case != "far rows"
    is_drawn = part.parameter.width is not None
    assert bool(wrong(seed=8)) == (is_seen and (is_drawn or (chaos > 0 and case == "norm")))
    # 1% of at least a thousand elements; of a bias, which is zero, none.
    if is_seen and part.tensor.numel() > 1000:
        assert wrong(chaos=chaos + 1)
    with torch.no_grad():
        part.tensor.view(-1)[0] += 1
    assert wrong() == (f"1 of {_seen(case)} initial weights are not those of the seed" * is_seen)


def _seen(case: str) -> int:
    """The elements that a rank compares, counted by hand: rows of 4096 elements or more of each range."""
    return {
        **{"first rows": 43 * 96, "gate and up": 16 * 80, "columns": 46 * 30, "whole": 32 * 128},
        **{
            "narrow": 63,
            "long rows": 2 * DRAWN + 5,
            "norm": 130,
            "bias": 65,
            "embedding": 43 * 96,
            "far rows": 0,
        },
    }[case]

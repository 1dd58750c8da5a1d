"""The rotary angles in float64, beside Megatron-Core's in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.proof.products import num_wrong
from quantexp.proof.rotary import Rotary
from quantexp.schema import ModelConfig

_LENGTH = 1 << 17


def _model(name: str, *words: str) -> ModelConfig:
    return compose([f"model={name}", *words]).model


MODELS = {
    "plain": ("tiny", ()),
    "large base": ("tiny", ("model.rotary_base=1000000", "model.rope_scaling_factor=null")),
    "llama 3": ("llama31-8b", ()),
    "llama 3, factor 32": ("llama32-1b", ()),
    "yarn": ("deepseek2_lite", ()),
    "yarn, another factor": ("deepseek2_lite", ("model.mla.yarn.factor=4",)),
}


def _megatron(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, float]:
    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    group: Any = type("Alone", (), {"size": lambda self: 1, "rank": lambda self: 0})()
    if model.mla is not None and model.mla.yarn is not None:
        yarn = model.mla.yarn
        return YarnRotaryEmbedding(
            model.mla.qk_pos_emb_head_dim,
            rotary_base=model.rotary_base,
            scaling_factor=yarn.factor,
            original_max_position_embeddings=yarn.original_length,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            mscale=yarn.mscale,
            mscale_all_dim=yarn.mscale_all_dim,
            cp_group=group,
        )(_LENGTH)
    embedding = RotaryEmbedding(
        model.head_dim,
        1.0,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling_factor is not None,
        rope_scaling_factor=model.rope_scaling_factor or 1.0,
        cp_group=group,
    )
    return embedding(_LENGTH), 1.0


@pytest.mark.parametrize("name", MODELS)
def test_angles_of_every_kind_are_those_of_megatron(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, words = MODELS[name]
    model = _model(shape, *words)
    angles, magnitude = _megatron(model, monkeypatch)
    tokens = torch.arange(0, _LENGTH, 61)
    expected = Rotary(model).angles(tokens, _LENGTH, torch.device("cpu"))
    assert Rotary(model).magnitude == pytest.approx(magnitude, rel=1e-12)
    own = angles[tokens, 0]
    assert num_wrong(own, expected) == 0
    # A change of the table that matters is none of rounding: 2^-12 of an angle, or a token.
    assert num_wrong(own * (1 + 2.0**-12), expected) > 0.9 * own.numel()
    assert num_wrong(own.roll(1, 0), expected) > 0.9 * own.numel()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_two_parts_of_the_sequence_from_its_ends(size: int) -> None:
    model, num_own = _model("tiny"), 256 // size
    whole = Rotary(model).angles(torch.arange(256), 256, torch.device("cpu")).values
    parts = whole.chunk(2 * size)
    for rank in range(size):
        own = Rotary(model, rank, size).angles(torch.arange(num_own), num_own, torch.device("cpu"))
        assert torch.equal(own.values, torch.cat([parts[rank], parts[2 * size - 1 - rank]]))

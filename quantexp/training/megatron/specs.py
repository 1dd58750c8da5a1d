"""Replaces Megatron's classes in a decoder's spec by the scheme's, and changes nothing else.

Megatron describes a layer as a tree of `ModuleSpec` dataclasses. `inject` replaces classes anywhere in that tree, so it
covers every linear layer and the core attention of any spec.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from quantexp.model.decoder import moe_of
from quantexp.schema import ModelConfig
from quantexp.training.megatron.attention import (
    LatentCoreAttention,
    SchemeAttention,
)
from quantexp.training.megatron.latent import SchemeMLASelfAttention
from quantexp.training.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear
from quantexp.training.megatron.norm import MarkedRMSNorm
from quantexp.training.megatron.without_te import complete_megatron

#: Stock class -> class with the scheme's products.
CLASSES: dict[type, type] = {
    ColumnParallelLinear: SchemeColumnParallelLinear,
    RowParallelLinear: SchemeRowParallelLinear,
    DotProductAttention: SchemeAttention,
    LatentCoreAttention: SchemeAttention,
    MLASelfAttention: SchemeMLASelfAttention,
}


def stock_spec(model: ModelConfig) -> TransformerBlockSubmodules:
    """Megatron's stock decoder for a model, without Transformer Engine."""
    layers = []
    for layer in range(model.num_layers):
        moe = moe_of(model, layer)
        experts = moe.num_experts if moe else None
        layers.append(stock_layer_spec(model.mla is not None, experts, model.qk_norm))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=MarkedRMSNorm)


def stock_layer_spec(
    latent_attention: bool = False, num_experts: int | None = None, qk_norm: bool = False
) -> ModuleSpec:
    """Megatron's stock layer: RMSNorm, grouped-query or latent attention, a gated MLP or sequential experts.

    `qk_norm` adds an RMSNorm of each query and key head to grouped-query attention.
    """
    complete_megatron()
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        multi_latent_attention=latent_attention,
        qk_layernorm=latent_attention or qk_norm,  # of latents, or of heads
        normalization="RMSNorm",
    )
    stock: dict[type, type] = {WrappedTorchNorm: MarkedRMSNorm}
    if latent_attention:
        stock[DotProductAttention] = LatentCoreAttention
    return inject(spec, stock)


def inject(spec: Any, classes: dict[type, type] = CLASSES) -> Any:
    """A copy of a spec with every class in `classes` replaced."""
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, dict):
        return {key: inject(value, classes) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(inject(value, classes) for value in spec)
    if dataclasses.is_dataclass(spec):
        changed = {f.name: inject(getattr(spec, f.name), classes) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **changed)  # type: ignore[type-var]
    return spec

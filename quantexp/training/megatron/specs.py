"""The decoder layer's spec with our classes in place of Megatron's, and nothing else changed.

Megatron describes a layer as a tree of `ModuleSpec` dataclasses. `injected` maps classes over that tree, so that it
reaches every linear layer and the core attention wherever a spec puts them.
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
from quantexp.training.megatron.attention import LatentCoreAttention, SchemeAttention
from quantexp.training.megatron.latent import SchemeMLASelfAttention
from quantexp.training.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear
from quantexp.training.megatron.without_te import complete_megatron

#: Stock class -> the class that multiplies as the scheme declares.
CLASSES: dict[type, type] = {
    ColumnParallelLinear: SchemeColumnParallelLinear,
    RowParallelLinear: SchemeRowParallelLinear,
    DotProductAttention: SchemeAttention,
    LatentCoreAttention: SchemeAttention,
    MLASelfAttention: SchemeMLASelfAttention,
}


def stock_spec(model: ModelConfig) -> TransformerBlockSubmodules:
    """Megatron's own decoder for a model, without Transformer Engine, layer by layer."""
    layers = []
    for layer in range(model.num_layers):
        moe = moe_of(model, layer)
        layers.append(stock_layer_spec(model.mla is not None, moe.num_experts if moe else None))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


def stock_layer_spec(latent_attention: bool = False, num_experts: int | None = None) -> ModuleSpec:
    """Megatron's own layer: RMSNorm, grouped-query or latent attention, gated MLP or experts one after the other."""
    complete_megatron()
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        multi_latent_attention=latent_attention,
        qk_layernorm=latent_attention,  # the latents' norms
        normalization="RMSNorm",
    )
    return injected(spec, {DotProductAttention: LatentCoreAttention}) if latent_attention else spec


def injected(spec: Any, classes: dict[type, type] = CLASSES) -> Any:
    """The same spec with every class of `classes` replaced; the given spec is left as it is."""
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, dict):
        return {key: injected(value, classes) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(injected(value, classes) for value in spec)
    if dataclasses.is_dataclass(spec):
        changed = {
            f.name: injected(getattr(spec, f.name), classes) for f in dataclasses.fields(spec)
        }
        return dataclasses.replace(spec, **changed)  # type: ignore[type-var]
    return spec

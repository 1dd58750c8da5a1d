"""Replaces Megatron's classes in a decoder's spec by the scheme's, and changes nothing else.

Megatron describes a layer as a tree of `ModuleSpec` dataclasses, and of builders: a class, a constructor of one, or
either with arguments (`functools.partial`). `inject` replaces classes anywhere in that tree. It cannot look into any
other function; `require_reached` refuses a model with a class of Megatron's that `inject` should have replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from quantexp.errors import RunError
from quantexp.model.decoder import moe_of
from quantexp.schema import ModelConfig
from quantexp.training.megatron.attention import (
    LatentCoreAttention,
    SchemeAttention,
)
from quantexp.training.megatron.latent import LatentSelfAttention, SchemeMLASelfAttention
from quantexp.training.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear
from quantexp.training.megatron.norm import MarkedRMSNorm
from quantexp.training.megatron.without_te import complete_megatron, megatron_version

#: Stock class -> class with the scheme's products.
CLASSES: dict[type, type] = {
    ColumnParallelLinear: SchemeColumnParallelLinear,
    RowParallelLinear: SchemeRowParallelLinear,
    DotProductAttention: SchemeAttention,
    LatentCoreAttention: SchemeAttention,
    LatentSelfAttention: SchemeMLASelfAttention,
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
        stock[MLASelfAttention] = LatentSelfAttention
    return inject(spec, stock)


def inject(
    spec: Any,
    classes: Mapping[type, type] = CLASSES,
    of_fields: Mapping[str, Mapping[type, type]] | None = None,
) -> Any:
    """A copy of a spec with every class in `classes` replaced.

    Args:
        spec: a class, a constructor of one (a class method), or either with arguments; dataclasses, lists and
            dictionaries of these. All else is returned as it is.
        classes: stock class -> replacement.
        of_fields: other replacements for all that lies in a field or argument of this name.
    """
    others = of_fields or {}

    def each(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: inject(value, others.get(name, classes), of_fields)
            for name, value in values.items()
        }

    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, MethodType):
        owner = spec.__self__
        return getattr(inject(owner, classes), spec.__name__) if isinstance(owner, type) else spec
    if isinstance(spec, partial):
        function, *args = (inject(value, classes, of_fields) for value in (spec.func, *spec.args))
        return partial(function, *args, **each(spec.keywords))
    if isinstance(spec, dict):
        return each(spec)
    if isinstance(spec, list | tuple):
        return type(spec)(inject(value, classes, of_fields) for value in spec)
    if dataclasses.is_dataclass(spec):
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **each(values))  # type: ignore[type-var]
    return spec


def require_reached(decoder: nn.Module) -> None:
    """Refuse a decoder, built from a spec of `inject`, in which a class is still Megatron's.

    Raises:
        RunError: names the first such module.
    """
    for path, module in decoder.named_modules():
        if type(module) in CLASSES:
            raise RunError(
                f"decoder.{path} is Megatron-Core {megatron_version()}'s {type(module).__name__}, built by a part of "
                "its spec into which the scheme cannot be injected; use a Megatron-Core that docs/install.md lists"
            )

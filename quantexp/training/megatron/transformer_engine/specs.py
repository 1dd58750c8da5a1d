"""The decoder's spec with Transformer Engine's linear layers; all else is that of the emulation.

The local spec keeps norms apart from linear layers, so that a layer's input is a tensor in high precision, and the
modules have the same names under every backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from quantexp.schema import Backend, ModelConfig
from quantexp.training.megatron.specs import CLASSES, inject, stock_spec
from quantexp.training.megatron.transformer_engine.linear import (
    NativeColumnParallelLinear,
    NativeRowParallelLinear,
    OwnFormatsColumnParallelLinear,
    OwnFormatsRowParallelLinear,
)

_LINEAR: dict[Backend, dict[type, type]] = {
    Backend.transformer_engine: {
        ColumnParallelLinear: NativeColumnParallelLinear,
        RowParallelLinear: NativeRowParallelLinear,
    },
    Backend.te_emulated: {
        ColumnParallelLinear: OwnFormatsColumnParallelLinear,
        RowParallelLinear: OwnFormatsRowParallelLinear,
    },
}


def native_spec(model: ModelConfig, backend: Backend) -> TransformerBlockSubmodules:
    """The stock decoder with a backend's linear layers; routed experts have the emulation's."""
    stock = stock_spec(model)
    layers = [_with_emulated_experts(layer) for layer in stock.layer_specs]
    spec: TransformerBlockSubmodules = inject(
        dataclasses.replace(stock, layer_specs=layers), CLASSES | _LINEAR[backend]
    )
    return spec


def _with_emulated_experts(layer: ModuleSpec) -> ModuleSpec:
    mlp: Any = layer.submodules.mlp
    experts = getattr(mlp.submodules, "experts", None)
    if experts is None:
        return layer
    parts = dataclasses.replace(mlp.submodules, experts=inject(experts))
    mlp = dataclasses.replace(mlp, submodules=parts)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp))

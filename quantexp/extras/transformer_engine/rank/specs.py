"""The decoder's spec with Transformer Engine's linear layers; all else is that of the emulation.

The local spec keeps norms apart from linear layers, so that a layer's input is a tensor in high precision, and the
modules have the same names under every backend.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from quantexp.extras.transformer_engine.rank.linear import (
    NativeColumnParallelLinear,
    NativeRowParallelLinear,
    OwnFormatsColumnParallelLinear,
    OwnFormatsRowParallelLinear,
)
from quantexp.schema import Backend, ModelConfig
from quantexp.training.megatron.specs import CLASSES, inject, stock_spec

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
    classes = CLASSES | _LINEAR[backend]
    spec: TransformerBlockSubmodules = inject(stock_spec(model), classes, {"experts": CLASSES})
    return spec

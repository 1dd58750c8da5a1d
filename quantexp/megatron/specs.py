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
from megatron.core.transformer.spec_utils import ModuleSpec

from quantexp.megatron.attention import SchemeAttention
from quantexp.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear

#: Stock class -> the class that multiplies as the scheme declares.
CLASSES: dict[type, type] = {
    ColumnParallelLinear: SchemeColumnParallelLinear,
    RowParallelLinear: SchemeRowParallelLinear,
    DotProductAttention: SchemeAttention,
}


def stock_layer_spec() -> ModuleSpec:
    """Megatron's own layer, without Transformer Engine: RMSNorm, grouped-query attention, gated MLP."""
    return get_gpt_layer_local_spec(normalization="RMSNorm")


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

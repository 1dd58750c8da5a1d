"""Megatron's latent attention with the scheme's linear layers.

Megatron builds the down projections of latent attention only from its own class. This module builds them so and then
changes their class to the scheme's: the two classes differ in how they multiply, not in their attributes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


class SchemeMLASelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention whose down projections may use a subclass of ColumnParallelLinear."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        scheme = {name: getattr(submodules, name) for name in _DOWN}
        stock = dict.fromkeys(_DOWN, ColumnParallelLinear)
        super().__init__(config, dataclasses.replace(submodules, **stock), *args, **kwargs)
        for name, scheme_class in scheme.items():
            module = getattr(self, name, None)
            if module is not None:
                module.__class__ = scheme_class

"""Megatron's latent attention with the scheme's linear layers.

Megatron builds the down projections of latent attention from no other class than its own, so they are built from that
and turned into ours afterwards; the classes differ in how they multiply, not in what they hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


class SchemeMLASelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention whose down projections may be of a subclass of ColumnParallelLinear."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        wanted = {name: getattr(submodules, name) for name in _DOWN}
        stock = dict.fromkeys(_DOWN, ColumnParallelLinear)
        super().__init__(config, dataclasses.replace(submodules, **stock), *args, **kwargs)
        for name, of_class in wanted.items():
            module = getattr(self, name, None)
            if module is not None:
                module.__class__ = of_class

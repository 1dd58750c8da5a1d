"""RMSNorm that sequence parallelism can use.

Megatron's own wrapper around torch's norm refuses sequence parallelism, where each rank normalises its share of the
tokens. The weight's gradient is then a part of the sum, which Megatron reduces for every parameter that is marked
`sequence_parallel`.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class MarkedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked if the tokens are divided between tensor-parallel ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

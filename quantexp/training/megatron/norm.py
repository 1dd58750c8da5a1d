"""RMSNorm that sequence parallelism can use, and the one whose gain and result a scheme quantises.

Megatron's own wrapper around torch's norm refuses sequence parallelism, where each rank normalises its share of the
tokens. The weight's gradient is then a part of the sum, which Megatron reduces for every parameter that is marked
`sequence_parallel`.

    # T tokens, B sequences, D width (of the residual stream, of a latent, or of each head)

    gain_D = quantised w_D          y_TBD = quantised (x / rms(x) gain)

Both gradients go straight through: that of x is the norm's with the quantised gain, that of the quantised gain is w's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from quantexp.quant.hooks import FORWARD, POST, PRE, TensorHook, no_hook
from quantexp.quant.multiply import quantised_operand
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import ProductContext, show_product
from quantexp.quant.sites import NORM_W, NORM_Y, Slot


class MarkedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked if the tokens are divided between tensor-parallel ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, precision: ModulePrecision, slot: Slot) -> Tensor:
        return quantised_operand(precision, slot, x).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class SchemeRMSNorm(MarkedRMSNorm):
    """The norm with a quantised gain and result; `set_precision` sets `precision`."""

    precision: ModulePrecision
    hook: TensorHook = staticmethod(no_hook)

    def forward(self, x: Tensor) -> Tensor:
        """x normalised along its last dimension; the hook receives the gain and the result before quantisation."""
        self.hook(FORWARD, PRE, "weight", self.weight)
        gain = self._rounded(NORM_W, self.weight)
        y = functional.rms_norm(x, self.normalized_shape, gain, self.eps)
        self.hook(FORWARD, POST, "output", y)
        module = self.precision.module
        show_product(ProductContext(module, NORM_Y.site, NORM_Y.product), y, gain)
        return self._rounded(NORM_Y, y)

    def _rounded(self, slot: Slot, x: Tensor) -> Tensor:
        if not self.precision.spec(slot).quantised:
            return x
        rounded: Tensor = _Rounded.apply(x, self.precision, slot)  # type: ignore[no-untyped-call]
        return rounded

"""Megatron's embedding where it is tied to a quantised output layer: it looks up the weight that fprop multiplies.

    # T tokens, V rows of the vocabulary that the rank has, D hidden size

    table_VD = quantised weight_VD      the copy for fprop, of the same bits on every stage that holds the weight
    x_TD     = table_VD[tokens_T]

The derivative goes straight through to the weight: zero where it saturated, if fprop's slot sets `clip_gradient`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor

from quantexp.model.decoder import OUTPUT
from quantexp.quant.multiply import clipped_gradient
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import ProductContext, product_context
from quantexp.quant.sites import DGRAD_W, FPROP_W, LOOKUP_W
from quantexp.quant.weight_cache.weights import WeightCopies


class _Table(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, precision: ModulePrecision, copies: WeightCopies) -> Tensor:
        ctx.precision = precision
        ctx.save_for_backward(w)
        return copies.for_fprop(precision, w, dgrad_follows=False).view_as(w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        return clipped_gradient(ctx.precision, FPROP_W, grads[0], w), None, None


class SchemeEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's VocabParallelEmbedding with the quantised weight; `set_precision` sets `precision`."""

    precision: ModulePrecision
    #: Replaced by `share_weight_copies`; this default stores nothing.
    copies: WeightCopies = WeightCopies()

    def forward(self, input_: Tensor) -> Tensor:
        """Megatron's forward pass on the table that takes the place of the weight meanwhile."""
        w, spec = self.weight, self.precision.spec(LOOKUP_W)
        module = self.precision.module._replace(name=OUTPUT)
        of_weight = ModulePrecision(module, {FPROP_W: spec, DGRAD_W: spec})
        table = _Table.apply(w, of_weight, self.copies) if spec.quantised else w  # type: ignore[no-untyped-call]
        context = ProductContext(self.precision.module, LOOKUP_W.site, LOOKUP_W.product)
        # An entry of the instance hides the parameter, which stays registered.
        self.__dict__["weight"] = table
        try:
            with product_context(context):
                output: Tensor = VocabParallelEmbedding.forward(self, input_)
        finally:
            del self.__dict__["weight"]
        return output

"""Runs one matrix product in its context, and compensates operands pre-scaled by 3/4."""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.quant.product_context import ProductContext, product_context
from quantexp.quant.slots import Operand

#: The factor of a product for each operand scaled by 3/4 (arXiv 2502.20586).
POST_SCALE = 4.0 / 3.0


def post_scale(*operands: Operand) -> float:
    """1, 4/3 or 16/9."""
    return POST_SCALE ** sum(bool(operand.pre_scale) for operand in operands)


def multiply(context: ProductContext, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` a b, with the scale applied before the product is rounded to its dtype.

    Args:
        context: identifies the product.
        a: [..., K] with a matrix b, [N, T, K] with a stack of matrices.
        b: [K, M] or [N, K, M].
        scale: in float32.
    """
    with product_context(context):
        if scale == 1.0:
            return torch.matmul(a, b)
        if b.dim() == 2:
            flat = a.flatten(0, -2)
            unused = flat.new_empty(flat.shape[0], b.shape[1])
            product = torch.addmm(unused, flat, b, beta=0.0, alpha=scale)
            return product.view(*a.shape[:-1], b.shape[1])
        unused = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
        return torch.baddbmm(unused, a, b, beta=0.0, alpha=scale)

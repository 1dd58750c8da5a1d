"""The call that multiplies: announced, and making up for operands of which only 3/4 was rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.quant.product_context import Announcement, announce
from quantexp.quant.slots import Operand

#: What a product is multiplied with for each operand that was scaled by 3/4 (arXiv 2502.20586).
POST_SCALE = 4.0 / 3.0


def post_scale(*operands: Operand) -> float:
    """1, 4/3 or 16/9."""
    return POST_SCALE ** sum(bool(operand.pre_scale) for operand in operands)


def multiply(announcement: Announcement, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` a b, the scale applied before the product is rounded to its dtype.

    Args:
        announcement: which product this is.
        a: [..., K] beside a matrix b, [N, T, K] beside a stack of them.
        b: [K, M] or [N, K, M].
        scale: in float32.
    """
    with announce(announcement):
        if scale == 1.0:
            return torch.matmul(a, b)
        if b.dim() == 2:
            flat = a.flatten(0, -2)
            unused = flat.new_empty(flat.shape[0], b.shape[1])
            product = torch.addmm(unused, flat, b, beta=0.0, alpha=scale)
            return product.view(*a.shape[:-1], b.shape[1])
        unused = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
        return torch.baddbmm(unused, a, b, beta=0.0, alpha=scale)

"""The three matrix products of a linear layer, each operand held as the scheme declares.

    fprop  y = x w^T     x and w in blocks along the input width
    dgrad  dx = g w      g and w in blocks along the output width
    wgrad  dw = g^T x    g and x in blocks along tokens, within one sequence

    # T tokens, B sequences, I input width, O output width; Megatron's layout is [T, B, width]

Every operand is quantised from the high-precision tensor, so a layer keeps x and w as they came and quantises x and w
a second time, along the other axis, in the backward. Results are in the working dtype; the products accumulate in fp32
(in the matrix product itself). No communication happens here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.quant.announce import Announcement, announce
from quantexp.quant.operand import held
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import Product, Site


def fprop(precision: ModulePrecision, x_TBI: Tensor, w_OI: Tensor) -> Tensor:
    """Y = x w^T, of shape [T, B, O]."""
    x = held(x_TBI, precision.operand(Site.LINEAR, Product.FPROP, "x"), -1)
    w = held(w_OI, precision.operand(Site.LINEAR, Product.FPROP, "w"), -1)
    with announce(Announcement(precision.module, Site.LINEAR, Product.FPROP)):
        return torch.matmul(x, w.t())


def dgrad(precision: ModulePrecision, g_TBO: Tensor, w_OI: Tensor) -> Tensor:
    """Dx = g w, of shape [T, B, I]."""
    g = held(g_TBO, precision.operand(Site.LINEAR, Product.DGRAD, "g"), -1)
    w = held(w_OI, precision.operand(Site.LINEAR, Product.DGRAD, "w"), 0)
    with announce(Announcement(precision.module, Site.LINEAR, Product.DGRAD)):
        return torch.matmul(g, w)


def wgrad(precision: ModulePrecision, g_TBO: Tensor, x_TBI: Tensor) -> Tensor:
    """Dw = g^T x, of shape [O, I]; a tensor of two dimensions ([tokens, width]) is one sequence."""
    g = held(g_TBO, precision.operand(Site.LINEAR, Product.WGRAD, "g"), 0)
    x = held(x_TBI, precision.operand(Site.LINEAR, Product.WGRAD, "x"), 0)
    sequences = g.shape[1] if g.dim() == 3 else 1
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    with announce(Announcement(precision.module, Site.LINEAR, Product.WGRAD, sequences)):
        return torch.matmul(g.t(), x)

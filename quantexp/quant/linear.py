"""The three matrix products of a linear layer, each operand held as the scheme declares.

    fprop  y = x w^T     x and w in blocks along the input width
    dgrad  dx = g w      g and w in blocks along the output width
    wgrad  dw = g^T x    g and x in blocks along tokens, within one sequence

    # T tokens, B sequences, I input width, O output width; Megatron's layout is [T, B, width]

Every operand is quantised from the high-precision tensor, so a layer keeps x and w as they came and quantises x and w
a second time, along the other axis, in the backward. A routed expert's tokens are rows [n, width]; how their blocks
along tokens lie, `quantexp.quant.rows` says. Results are in the working dtype; the products accumulate in fp32 (in the
matrix product itself). No communication happens here.
"""

from __future__ import annotations

from torch import Tensor

from quantexp.quant.announce import Announcement
from quantexp.quant.multiply import multiply, post_scale
from quantexp.quant.operand import held
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Product, Site
from quantexp.quant.slots import Operand
from quantexp.quant.tap import tell_operand


def fprop(precision: ModulePrecision, x_TBI: Tensor, w_OI: Tensor) -> Tensor:
    """Y = x w^T, of shape [T, B, O]."""
    left, right = (precision.operand(Site.LINEAR, Product.FPROP, name) for name in "xw")
    x, w = held(x_TBI, left, -1), held(w_OI, right, -1)
    tell_operand(precision, Site.LINEAR, Product.FPROP, "x", x_TBI, x)
    tell_operand(precision, Site.LINEAR, Product.FPROP, "w", w_OI, w)
    said = Announcement(
        precision.module,
        Site.LINEAR,
        Product.FPROP,
        sources=lambda: (x_TBI.reshape(-1, x_TBI.shape[-1]), w_OI.t()),
    )
    return multiply(said, x, w.t(), post_scale(left, right))


def dgrad(precision: ModulePrecision, g_TBO: Tensor, w_OI: Tensor) -> Tensor:
    """Dx = g w, of shape [T, B, I]."""
    left, right = (precision.operand(Site.LINEAR, Product.DGRAD, name) for name in "gw")
    g, w = held(g_TBO, left, -1), held(w_OI, right, 0)
    tell_operand(precision, Site.LINEAR, Product.DGRAD, "g", g_TBO, g)
    tell_operand(precision, Site.LINEAR, Product.DGRAD, "w", w_OI, w)
    said = Announcement(
        precision.module,
        Site.LINEAR,
        Product.DGRAD,
        sources=lambda: (g_TBO.reshape(-1, g_TBO.shape[-1]), w_OI),
    )
    return multiply(said, g, w, post_scale(left, right))


def wgrad(
    precision: ModulePrecision, g_TBO: Tensor, x_TBI: Tensor, rows: Rows | None = None
) -> Tensor:
    """Dw = g^T x, of shape [O, I].

    Operands of two dimensions are the tokens of an expert, of the sequences that `rows` says; without it, of one.
    """
    left, right = (precision.operand(Site.LINEAR, Product.WGRAD, name) for name in "gx")
    if rows is not None and (_has_blocks(left) or _has_blocks(right)):
        g_TBO, x_TBI = rows.laid_out(g_TBO), rows.laid_out(x_TBI)
    g, x = held(g_TBO, left, 0), held(x_TBI, right, 0)
    tell_operand(precision, Site.LINEAR, Product.WGRAD, "g", g_TBO, g)
    tell_operand(precision, Site.LINEAR, Product.WGRAD, "x", x_TBI, x)
    sequences = g.shape[1] if g.dim() == 3 else 1
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    said = Announcement(
        precision.module,
        Site.LINEAR,
        Product.WGRAD,
        sequences,
        lambda: (g_TBO.reshape(g.shape).t(), x_TBI.reshape(x.shape)),
    )
    return multiply(said, g.t(), x, post_scale(left, right))


def _has_blocks(operand: Operand) -> bool:
    return operand.block is not None or operand.hadamard_block is not None

"""The three matrix products of a linear layer, each operand held as the scheme declares.

    fprop  y = x w^T     x and w in blocks along the input width
    dgrad  dx = g w      g and w in blocks along the output width
    wgrad  dw = g^T x    g and x in blocks along tokens, within one sequence

    # T tokens, B sequences, I input width, O output width; Megatron's layout is [T, B, width]

Every operand is quantised from the high-precision tensor, never twice. A tensor that two products quantise in blocks of
the same format is read once for both copies (rows and columns), a format without blocks has one copy for both, and so
has a slot that uses the forward's copy again. What n micro-batches of a step read (R) and write (W), whole tensors, in
brackets what falls away where both products multiply one copy:

             quantise                               multiply
    fprop    x: R W [W], w: R W [W] once a step     R x, R w, W y
    dgrad    g: R W [W]                             R g, R w, W dx
    wgrad                                           R g, R x, W dw

Quantising is 6 n + 3 of them (4 n + 2 with one copy) beside the 9 n of the products, and a read more of each tensor
that is scaled by its own amax. With each operand read for itself it is 12 n: so it is where the two slots have
different formats or options or depend on the moment (stochastic rounding, delayed scales, a transform), where blocks
lie by sequence in an expert's rows, and without `training.weight_cache` for w. The copy of x for wgrad is kept for the
backward in the place of x.

A routed expert's tokens are rows [n, width]; how their blocks along tokens lie, `quantexp.quant.rows` says. Results are
in the working dtype; the products accumulate in fp32 (in the matrix product itself). No communication happens here.
"""

from __future__ import annotations

from torch import Tensor

from quantexp.quant.hooks import tell_operand, wants_operand
from quantexp.quant.multiply import multiply, post_scale
from quantexp.quant.operand import held, held_by_two, linear_dim
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import Announcement
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Product, Site
from quantexp.quant.slots import Operand
from quantexp.quant.weight_cache.buffers import Buffers


def fprop(
    precision: ModulePrecision,
    x_TBI: Tensor,
    w_OI: Tensor,
    *,
    held_x: Tensor | None = None,
    held_w: Tensor | None = None,
) -> Tensor:
    """Y = x w^T, of shape [T, B, O]; `held_x` and `held_w` are the operands where they were made already."""
    left, right = (precision.operand(Site.LINEAR, Product.FPROP, name) for name in "xw")
    x = held(x_TBI, left, -1) if held_x is None else held_x
    w = held(w_OI, right, -1) if held_w is None else held_w
    tell_operand(precision, Site.LINEAR, Product.FPROP, "x", x_TBI, x)
    tell_operand(precision, Site.LINEAR, Product.FPROP, "w", w_OI, w)
    said = Announcement(
        precision.module,
        Site.LINEAR,
        Product.FPROP,
        sources=lambda: (x_TBI.reshape(-1, x_TBI.shape[-1]), w_OI.t()),
    )
    return multiply(said, x, w.t(), post_scale(left, right))


def dgrad(
    precision: ModulePrecision,
    g_TBO: Tensor,
    w_OI: Tensor,
    *,
    held_g: Tensor | None = None,
    held_w: Tensor | None = None,
) -> Tensor:
    """Dx = g w, of shape [T, B, I]; `held_g` and `held_w` are the operands where they were made already."""
    left, right = (precision.operand(Site.LINEAR, Product.DGRAD, name) for name in "gw")
    g = held(g_TBO, left, -1) if held_g is None else held_g
    w = held(w_OI, right, linear_dim(right)) if held_w is None else held_w
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
    precision: ModulePrecision,
    g_TBO: Tensor,
    x_TBI: Tensor,
    rows: Rows | None = None,
    *,
    held_g: Tensor | None = None,
    held_x: Tensor | None = None,
) -> Tensor:
    """Dw = g^T x, of shape [O, I]; `held_g` and `held_x` are the operands where they were made already.

    Operands of two dimensions are the tokens of an expert, of the sequences that `rows` says; without it, of one.
    """
    left, right = (precision.operand(Site.LINEAR, Product.WGRAD, name) for name in "gx")
    if rows is not None and (left.has_blocks or right.has_blocks):
        g_TBO, x_TBI = rows.laid_out(g_TBO), rows.laid_out(x_TBI)
        held_g = None if held_g is None else rows.laid_out(held_g)
        held_x = None if held_x is None else rows.laid_out(held_x)
    g = held(g_TBO, left, 0) if held_g is None else held_g
    x = held(x_TBI, right, linear_dim(right)) if held_x is None else held_x
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


def input_copies(
    precision: ModulePrecision, x_TBI: Tensor, rows: Rows | None, buffers: Buffers
) -> tuple[Tensor, Tensor | None]:
    """X as fprop and as wgrad multiply it, the second where it takes no read of its own; of x's shape.

    The first is overwritten by the next call with these buffers, unless it is the second too.
    """
    first = precision.operand(Site.LINEAR, Product.FPROP, "x")
    second = precision.operand(Site.LINEAR, Product.WGRAD, "x")
    room = _room(precision, (Product.FPROP,), "x", x_TBI, buffers)
    if _lies_by_sequence(second, rows):
        return held(x_TBI, first, -1, out=room), None
    return held_by_two(x_TBI, first, second, (-1, linear_dim(second)), (room, None))


def gradient_copies(
    precision: ModulePrecision, g_TBO: Tensor, rows: Rows | None, buffers: Buffers
) -> tuple[Tensor, Tensor | None]:
    """G as dgrad and as wgrad multiply it, the second where it takes no read of its own; of g's shape.

    Both are overwritten by the next call with these buffers.
    """
    first = precision.operand(Site.LINEAR, Product.DGRAD, "g")
    second = precision.operand(Site.LINEAR, Product.WGRAD, "g")
    room = _room(precision, (Product.DGRAD, Product.WGRAD), "g", g_TBO, buffers)
    if _lies_by_sequence(second, rows):
        return held(g_TBO, first, -1, out=room), None
    other = _room(precision, (Product.WGRAD, Product.DGRAD), "g", g_TBO, buffers)
    return held_by_two(g_TBO, first, second, (-1, 0), (room, other))


def _room(
    precision: ModulePrecision,
    products: tuple[Product, ...],
    name: str,
    x: Tensor,
    buffers: Buffers,
) -> Tensor | None:
    """Where to write the operand of the first product; None is fresh memory.

    It is fresh where a tap, which may hold on to it, looks at it, or at that of another product, which may be the same.
    """
    quantised = precision.operand(Site.LINEAR, products[0], name).quantised
    asked = any(wants_operand(precision, Site.LINEAR, product, name) for product in products)
    if not quantised or asked:
        return None
    return buffers.until_the_next(f"{products[0].value}.{name}", x)


def backward_asks_for_input(precision: ModulePrecision) -> bool:
    """Whether the backward needs x itself beside the copy of it that wgrad multiplies.

    A clipped derivative does, whoever looks at wgrad's operands now, and the proof of engagement where it cannot judge
    the copy without what it was made from.
    """
    copy = precision.operand(Site.LINEAR, Product.WGRAD, "x")
    return (
        bool(precision.operand(Site.LINEAR, Product.FPROP, "x").clip_gradient)
        or copy.depends_on_moment
        or bool(copy.pre_scale)
        or wants_operand(precision, Site.LINEAR, Product.WGRAD, "x")
    )


def _lies_by_sequence(operand: Operand, rows: Rows | None) -> bool:
    return rows is not None and operand.has_blocks and operand.axis == "tokens"

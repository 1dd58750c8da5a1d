"""The three matrix products of a linear layer on quantised operands.

    fprop  y = x w^T     x and w in blocks along the input width
    dgrad  dx = g w      g and w in blocks along the output width
    wgrad  dw = g^T x    g and x in blocks along tokens, within one sequence

    # T tokens, B sequences, I input width, O output width; Megatron's layout is [T, B, width]

Every operand is quantised from the high-precision tensor, never twice. If two products quantise a tensor in blocks of
the same format, one read produces both copies (rows and columns). A format without blocks, and a slot that reuses the
forward copy, need one copy for both. Whole tensors read (R) and written (W) by each of n micro-batches in a step; in
brackets what is saved if both products multiply one copy:

             quantise                               multiply
    fprop    x: R W [W], w: R W [W] once a step     R x, R w, W y
    dgrad    g: R W [W]                             R g, R w, W dx
    wgrad                                           R g, R x, W dw

Quantisation moves 6 n + 3 tensors (4 n + 2 with one copy) besides the 9 n of the products; each tensor scaled by its
own amax is read once more. Without shared reads it is 12 n. That applies if the two slots have different formats or
options or need the step state (stochastic rounding, delayed scales, a transform), if an expert's rows have blocks by
sequence, and for w without `training.weight_cache`. The copy of x for wgrad replaces x in the saved tensors of the
backward pass.

A routed expert's tokens are rows [n, width]; `quantexp.quant.rows` describes their blocks along tokens. Results are in
the working dtype; the products accumulate in fp32 (inside the matrix product). This module does no communication.
"""

from __future__ import annotations

from torch import Tensor

from quantexp.quant.hooks import call_operand_hooks, is_operand_hooked
from quantexp.quant.multiply import multiply, post_scale
from quantexp.quant.operand import linear_dim, quantise_operand, quantise_pair
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import ProductContext
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Product, Site
from quantexp.quant.slots import Operand
from quantexp.quant.weight_cache.buffers import Buffers


def fprop(
    precision: ModulePrecision,
    x_TBI: Tensor,
    w_OI: Tensor,
    *,
    quantised_x: Tensor | None = None,
    quantised_w: Tensor | None = None,
) -> Tensor:
    """y = x w^T, of shape [T, B, O]; `quantised_x` and `quantised_w` are the operands, if they already exist."""
    left, right = (precision.operand(Site.LINEAR, Product.FPROP, name) for name in "xw")
    x = quantise_operand(x_TBI, left, -1) if quantised_x is None else quantised_x
    w = quantise_operand(w_OI, right, -1) if quantised_w is None else quantised_w
    call_operand_hooks(precision, Site.LINEAR, Product.FPROP, "x", x_TBI, x)
    call_operand_hooks(precision, Site.LINEAR, Product.FPROP, "w", w_OI, w)
    call_context = ProductContext(
        precision.module,
        Site.LINEAR,
        Product.FPROP,
        sources=lambda: (x_TBI.reshape(-1, x_TBI.shape[-1]), w_OI.t()),
    )
    return multiply(call_context, x, w.t(), post_scale(left, right))


def dgrad(
    precision: ModulePrecision,
    g_TBO: Tensor,
    w_OI: Tensor,
    *,
    quantised_g: Tensor | None = None,
    quantised_w: Tensor | None = None,
) -> Tensor:
    """dx = g w, of shape [T, B, I]; `quantised_g` and `quantised_w` are the operands, if they already exist."""
    left, right = (precision.operand(Site.LINEAR, Product.DGRAD, name) for name in "gw")
    g = quantise_operand(g_TBO, left, -1) if quantised_g is None else quantised_g
    w = quantise_operand(w_OI, right, linear_dim(right)) if quantised_w is None else quantised_w
    call_operand_hooks(precision, Site.LINEAR, Product.DGRAD, "g", g_TBO, g)
    call_operand_hooks(precision, Site.LINEAR, Product.DGRAD, "w", w_OI, w)
    call_context = ProductContext(
        precision.module,
        Site.LINEAR,
        Product.DGRAD,
        sources=lambda: (g_TBO.reshape(-1, g_TBO.shape[-1]), w_OI),
    )
    return multiply(call_context, g, w, post_scale(left, right))


def wgrad(
    precision: ModulePrecision,
    g_TBO: Tensor,
    x_TBI: Tensor,
    rows: Rows | None = None,
    *,
    quantised_g: Tensor | None = None,
    quantised_x: Tensor | None = None,
) -> Tensor:
    """dw = g^T x, of shape [O, I]; `quantised_g` and `quantised_x` are the operands, if they already exist.

    Operands of two dimensions are an expert's tokens; `rows` gives their sequences, None means one sequence.
    """
    left, right = (precision.operand(Site.LINEAR, Product.WGRAD, name) for name in "gx")
    if rows is not None and (left.has_blocks or right.has_blocks):
        g_TBO, x_TBI = rows.laid_out(g_TBO), rows.laid_out(x_TBI)
        quantised_g = None if quantised_g is None else rows.laid_out(quantised_g)
        quantised_x = None if quantised_x is None else rows.laid_out(quantised_x)
    g = quantise_operand(g_TBO, left, 0) if quantised_g is None else quantised_g
    x = quantise_operand(x_TBI, right, linear_dim(right)) if quantised_x is None else quantised_x
    call_operand_hooks(precision, Site.LINEAR, Product.WGRAD, "g", g_TBO, g)
    call_operand_hooks(precision, Site.LINEAR, Product.WGRAD, "x", x_TBI, x)
    sequences = g.shape[1] if g.dim() == 3 else 1
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    call_context = ProductContext(
        precision.module,
        Site.LINEAR,
        Product.WGRAD,
        sequences,
        lambda: (g_TBO.reshape(g.shape).t(), x_TBI.reshape(x.shape)),
    )
    return multiply(call_context, g.t(), x, post_scale(left, right))


def input_copies(
    precision: ModulePrecision, x_TBI: Tensor, rows: Rows | None, buffers: Buffers
) -> tuple[Tensor, Tensor | None]:
    """x quantised for fprop and for wgrad, in x's shape; None for the second if it needs a read of its own.

    The next call with these buffers overwrites the first copy, unless both are one tensor.
    """
    first = precision.operand(Site.LINEAR, Product.FPROP, "x")
    second = precision.operand(Site.LINEAR, Product.WGRAD, "x")
    buffer = _buffer(precision, (Product.FPROP,), "x", x_TBI, buffers)
    if _lies_by_sequence(second, rows):
        return quantise_operand(x_TBI, first, -1, out=buffer), None
    return quantise_pair(x_TBI, first, second, (-1, linear_dim(second)), (buffer, None))


def gradient_copies(
    precision: ModulePrecision, g_TBO: Tensor, rows: Rows | None, buffers: Buffers
) -> tuple[Tensor, Tensor | None]:
    """g quantised for dgrad and for wgrad, in g's shape; None for the second if it needs a read of its own.

    The next call with these buffers overwrites both copies.
    """
    first = precision.operand(Site.LINEAR, Product.DGRAD, "g")
    second = precision.operand(Site.LINEAR, Product.WGRAD, "g")
    buffer = _buffer(precision, (Product.DGRAD, Product.WGRAD), "g", g_TBO, buffers)
    if _lies_by_sequence(second, rows):
        return quantise_operand(g_TBO, first, -1, out=buffer), None
    other = _buffer(precision, (Product.WGRAD, Product.DGRAD), "g", g_TBO, buffers)
    return quantise_pair(g_TBO, first, second, (-1, 0), (buffer, other))


def _buffer(
    precision: ModulePrecision,
    products: tuple[Product, ...],
    name: str,
    x: Tensor,
    buffers: Buffers,
) -> Tensor | None:
    """The buffer for the operand of the first product; None means fresh memory.

    Memory is fresh if a hook, which may keep it, needs this operand or that of another product, as both may be one
    tensor.
    """
    quantised = precision.operand(Site.LINEAR, products[0], name).quantised
    hooked = any(is_operand_hooked(precision, Site.LINEAR, product, name) for product in products)
    if not quantised or hooked:
        return None
    return buffers.for_next_use(f"{products[0].value}.{name}", x)


def backward_needs_input(precision: ModulePrecision) -> bool:
    """Whether the backward pass needs x itself in addition to the copy that wgrad multiplies.

    A clipped derivative needs it, and so do hooks on wgrad's operands, and the proof of engagement where it cannot
    judge the copy without its source.
    """
    copy = precision.operand(Site.LINEAR, Product.WGRAD, "x")
    return (
        bool(precision.operand(Site.LINEAR, Product.FPROP, "x").clip_gradient)
        or copy.needs_step_state
        or bool(copy.pre_scale)
        or is_operand_hooked(precision, Site.LINEAR, Product.WGRAD, "x")
    )


def _lies_by_sequence(operand: Operand, rows: Rows | None) -> bool:
    return rows is not None and operand.has_blocks and operand.axis == "tokens"

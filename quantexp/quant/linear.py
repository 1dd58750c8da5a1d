"""The three matrix products of a linear layer on quantised operands.

    fprop  y = x w^T     x and w in blocks along the input width
    dgrad  dx = g w      g and w in blocks along the output width
    wgrad  dw = g^T x    g and x in blocks along tokens, within one sequence

    # T tokens, B sequences, I input width, O output width; Megatron's layout is [T, B, width]

Every operand is quantised from the high-precision tensor, except one of a slot with `of`: that quantises the values
that the forward product multiplied, or a stored copy, either of which it makes again. If two products quantise a tensor
in blocks of the same format, one read produces both copies (rows and columns). A format without blocks, and a slot that
reuses the forward copy, need one copy for both. Whole tensors read (R) and written (W) by each of n micro-batches in a
step; in brackets what is saved if both products multiply one copy:

             quantise                               multiply
    fprop    x: R W [W], w: R W [W] once a step     R x, R w, W y
    dgrad    g: R W [W]                             R g, R w, W dx
    wgrad                                           R g, R x, W dw

Quantisation moves 6 n + 3 tensors (4 n + 2 with one copy) besides the 9 n of the products; each tensor scaled by its
own amax is read once more. Without shared reads it is 12 n. That applies if the two slots have different formats or
options or need the step state (stochastic rounding, delayed scales, a transform), if an expert's rows have blocks by
sequence, and for w without `training.weight_cache`. The copy of x for wgrad replaces x in the saved tensors of the
backward pass.

A routed expert's tokens are rows [n, width]; `quantexp.quant.rows` describes their blocks along tokens. Gradients by a
transformed forward copy are those of the transform, which `quantexp.quant.multiply.turned_back` undoes. Results are in
the working dtype; the products accumulate in fp32 (inside the matrix product). This module does no communication.
"""

from __future__ import annotations

from torch import Tensor

from quantexp.formats import Axis, QuantSpec
from quantexp.formats.torch_internals import beside_modes
from quantexp.quant.hooks import is_operand_hooked
from quantexp.quant.multiply import (
    Factor,
    clipped_gradient,
    make_operand,
    multiply_operands,
    quantise_operand,
    quantise_pair,
)
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sharing import shares_copy
from quantexp.quant.sites import DGRAD_G, DGRAD_W, FPROP_W, FPROP_X, WGRAD_G, WGRAD_X, Slot, dim_of
from quantexp.quant.sources import (
    clipped_by_source,
    differs_by_source,
    multiply_rows,
    quantise_by_source,
    source_of_rows,
)
from quantexp.quant.weight_cache.buffers import Buffers
from quantexp.quant.whole_amax import whole_amax


def fprop(
    precision: ModulePrecision,
    x_TBI: Tensor,
    w_OI: Tensor,
    rows: Rows | None = None,
    *,
    quantised_x: Tensor | None = None,
    quantised_w: Tensor | None = None,
) -> Tensor:
    """y = x w^T, of shape [T, B, O]; `quantised_x` and `quantised_w` are the operands, if they already exist.

    `rows` are as in `wgrad`.
    """
    if quantised_x is None:
        x_TBI = source_of_rows(precision, FPROP_X, x_TBI, rows)
        quantised_x = quantise_by_source(precision, FPROP_X, x_TBI, rows)
    return multiply_rows(
        precision,
        Factor(FPROP_X, x_TBI, copy=quantised_x),
        Factor(FPROP_W, w_OI, Tensor.t, copy=quantised_w),
        rows,
    )


def dgrad(
    precision: ModulePrecision,
    g_TBO: Tensor,
    w_OI: Tensor,
    rows: Rows | None = None,
    *,
    quantised_g: Tensor | None = None,
    quantised_w: Tensor | None = None,
) -> Tensor:
    """dx = g w, of shape [T, B, I]; `quantised_g` and `quantised_w` are the operands, if they already exist.

    `rows` are as in `wgrad`.
    """
    if quantised_g is None:
        g_TBO = source_of_rows(precision, DGRAD_G, g_TBO, rows)
        quantised_g = quantise_by_source(precision, DGRAD_G, g_TBO, rows)
    return multiply_rows(
        precision,
        Factor(DGRAD_G, g_TBO, copy=quantised_g),
        Factor(DGRAD_W, w_OI, copy=quantised_w),
        rows,
    )


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
    if quantised_x is None:
        x_TBI = source_of_rows(precision, WGRAD_X, x_TBI, rows)
    if quantised_g is None:
        g_TBO = source_of_rows(precision, WGRAD_G, g_TBO, rows)
    if rows is not None and any(precision.spec(slot).has_blocks for slot in (WGRAD_G, WGRAD_X)):
        g_TBO, x_TBI = rows.laid_out(g_TBO), rows.laid_out(x_TBI)
        quantised_g = None if quantised_g is None else rows.laid_out(quantised_g)
        quantised_x = None if quantised_x is None else rows.laid_out(quantised_x)
    if quantised_g is None:
        quantised_g = quantise_by_source(precision, WGRAD_G, g_TBO, rows)
    if quantised_x is None:
        quantised_x = quantise_by_source(precision, WGRAD_X, x_TBI, rows)
    return multiply_operands(
        precision,
        Factor(WGRAD_G, g_TBO, lambda g: _all_tokens(g).t(), copy=quantised_g),
        Factor(WGRAD_X, x_TBI, _all_tokens, copy=quantised_x),
    )


def _all_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@beside_modes
def input_copies(
    precision: ModulePrecision, x_TBI: Tensor, rows: Rows | None, buffers: Buffers
) -> tuple[Tensor, Tensor | None]:
    """x quantised for fprop and for wgrad, in x's shape; None for the second if it needs a read of its own.

    The next call with these buffers overwrites the first copy, unless both are one tensor.
    """
    buffer = _buffer(precision, (FPROP_X,), x_TBI, buffers)
    return _copies(precision, (FPROP_X, WGRAD_X), x_TBI, rows, (buffer, None))


@beside_modes
def gradient_copies(
    precision: ModulePrecision, g_TBO: Tensor, rows: Rows | None, buffers: Buffers
) -> tuple[Tensor, Tensor | None]:
    """g quantised for dgrad and for wgrad, in g's shape; None for the second if it needs a read of its own.

    The next call with these buffers overwrites both copies.
    """
    buffer = _buffer(precision, (DGRAD_G, WGRAD_G), g_TBO, buffers)
    other = _buffer(precision, (WGRAD_G, DGRAD_G), g_TBO, buffers)
    return _copies(precision, (DGRAD_G, WGRAD_G), g_TBO, rows, (buffer, other))


def _copies(
    precision: ModulePrecision,
    slots: tuple[Slot, Slot],
    x: Tensor,
    rows: Rows | None,
    out: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """x quantised for two products; None for the second if it needs a read of its own."""
    first, second = precision.spec(slots[0]), precision.spec(slots[1])
    if not first.quantised:
        return x, None if second.quantised else x
    source = source_of_rows(precision, slots[0], x, rows)
    axes = dim_of(slots[0].operand, first), dim_of(slots[1].operand, second)
    by_source = quantise_by_source(precision, slots[0], source, rows)
    if by_source is not None:
        return by_source, by_source if shares_copy(first, second) else None
    if first.parts or second.parts:
        return make_operand(precision.module, source, first, axes[0], out[0]), None
    amax = whole_amax(precision.module, source, first, axes[0])
    if _lies_by_sequence(second, rows):
        return quantise_operand(source, first, axes[0], amax, out=out[0]), None
    copy, other = quantise_pair(source, first, second, axes, out, amax)
    return copy, other if second.quantised else x


def _buffer(
    precision: ModulePrecision, slots: tuple[Slot, ...], x: Tensor, buffers: Buffers
) -> Tensor | None:
    """The buffer for the first slot; None means fresh memory.

    Memory is fresh if a hook, which may keep it, needs this operand or that of another slot, as both may be one tensor.
    """
    if not precision.spec(slots[0]).quantised or precision.spec(slots[0]).parts:
        return None
    if any(is_operand_hooked(precision, slot) for slot in slots):
        return None
    return buffers.for_next_use(str(slots[0]), x)


def backward_needs_input(precision: ModulePrecision) -> bool:
    """Whether the backward pass needs x itself in addition to the copy that wgrad multiplies.

    A clipped derivative needs it, and so do hooks on wgrad's operands.
    """
    copy = precision.spec(WGRAD_X)
    return (
        precision.spec(FPROP_X).clip_gradient
        or copy.needs_step_state
        or copy.is_pre_scaled
        or is_operand_hooked(precision, WGRAD_X)
    )


def clipped_input(
    precision: ModulePrecision, dx_TBI: Tensor, x_TBI: Tensor, rows: Rows | None
) -> Tensor:
    """dx, zero where x saturated in the forward product if its slot sets `clip_gradient`."""
    spec = precision.spec(FPROP_X)
    if rows is not None and spec.clip_gradient and differs_by_source(rows, spec):
        return clipped_by_source(precision, FPROP_X, dx_TBI, x_TBI, rows)
    return clipped_gradient(precision, FPROP_X, dx_TBI, x_TBI)


def _lies_by_sequence(spec: QuantSpec, rows: Rows | None) -> bool:
    return rows is not None and spec.has_blocks and spec.axis is Axis.TOKENS

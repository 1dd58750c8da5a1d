"""The matrix products of attention on quantised operands: the plain path.

    QK  fprop   S  = a q k^T      q, k in blocks along head_dim
        dgrad_q dq = a dS k       dS, k in blocks along keys
        dgrad_k dk = a dS^T q     dS, q in blocks along queries
    PV  fprop   o  = P v          P, v in blocks along keys
        dgrad_p dP = dO v^T       dO, v in blocks along head_dim
        dgrad_v dv = P^T dO       P, dO in blocks along queries

    # T tokens (queries or keys), B sequences, H query heads, G key-value heads, D head_dim, N = B*H
    # a is the softmax scale; S is a q k^T, and dS is the gradient of that

q, k and v are quantised after the rotary embedding and before each key-value head is repeated for its group of query
heads. The softmax between the two products is Megatron's own and stays in high precision; P is the probability after
mask and dropout. Every product's result is in the working dtype. The derivative of quantisation is the identity
(straight through), saturated elements included unless the slot sets `clip_gradient`. `reuse` slots take the forward
copy.
Blocks of v along keys span future tokens, and so does one scale per tensor: future tokens influence a token only
through that shared scale. The plain path stores S and P whole, T squared per head. It is the reference for the
`fused` and `tiled` paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantexp.quant.hooks import (
    BACKWARD,
    POST,
    PRE,
    Layout,
    TensorHook,
    call_operand_hooks,
    same_layout,
)
from quantexp.quant.multiply import multiply, post_scale
from quantexp.quant.operand import clipped, quantise_operand
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import ProductContext
from quantexp.quant.sites import PRODUCTS, Product, Site


def scores(
    precision: ModulePrecision,
    hook: TensorHook,
    q_TBHD: Tensor,
    k_TBGD: Tensor,
    softmax_scale: float,
) -> Tensor:
    """S = a q k^T, of shape [N, T queries, T keys], differentiable in q and k."""
    result: Tensor = _Scores.apply(q_TBHD, k_TBGD, precision, hook, softmax_scale)  # type: ignore[no-untyped-call]
    return result


def context(precision: ModulePrecision, hook: TensorHook, P_NTT: Tensor, v_TBGD: Tensor) -> Tensor:
    """O = P v, of shape [N, T, D], differentiable in P and v."""
    result: Tensor = _Context.apply(P_NTT, v_TBGD, precision, hook)  # type: ignore[no-untyped-call]
    return result


def by_head(x_TBHD: Tensor) -> Tensor:
    """[T, B, H, D] as [N, T, D], a view where the layout allows."""
    T, B, H, D = x_TBHD.shape
    return x_TBHD.reshape(T, B * H, D).transpose(0, 1)


def expanded(x_TBGD: Tensor, num_heads: int) -> Tensor:
    """Each key-value head repeated for its group of query heads: [T, B, H, D]."""
    repeats = num_heads // x_TBGD.shape[2]
    return x_TBGD if repeats == 1 else x_TBGD.repeat_interleave(repeats, dim=2)


def by_token(x_NTD: Tensor, sequences: int) -> Tensor:
    """[T, B, H, D] from [N, T, D]: the inverse of `by_head`."""
    N, T, D = x_NTD.shape
    return x_NTD.transpose(0, 1).reshape(T, sequences, N // sequences, D)


def summed_over_group(x_NTD: Tensor, sequences: int, groups: int) -> Tensor:
    """The gradient of `expanded`, from [N, T, D] to [T, B, G, D]."""
    x_TBHD = by_token(x_NTD, sequences)
    if x_TBHD.shape[2] == groups:
        return x_TBHD
    return x_TBHD.reshape(*x_TBHD.shape[:2], groups, -1, x_TBHD.shape[3]).sum(dim=3)


def by_sequence_layout(sequences: int) -> Layout:
    """[N, T, T] as [B, H, T, T], the layout in which P is captured."""
    return lambda x_NTT: x_NTT.view(sequences, -1, *x_NTT.shape[1:])


def _operand(
    precision: ModulePrecision,
    site: Site,
    product: Product,
    name: str,
    axis: int,
    x: Tensor,
    layout: Layout = same_layout,
) -> Tensor:
    """Quantises one operand according to its slot and calls the operand hooks."""
    result = quantise_operand(x, precision.operand(site, product, name), axis)
    call_operand_hooks(precision, site, product, name, x, result, layout)
    return result


def _forward_or_own(
    precision: ModulePrecision,
    site: Site,
    product: Product,
    name: str,
    axis: int,
    forward_axis: int,
    x: Tensor,
    layout: Layout = same_layout,
) -> Tensor:
    """A backward operand: quantised along its own axis, or the forward copy, recomputed bit for bit."""
    reused = precision.operand(site, product, name).reuse
    return _operand(precision, site, product, name, forward_axis if reused else axis, x, layout)


def _call_context(
    precision: ModulePrecision, site: Site, product: Product, *sources: Callable[[], Tensor]
) -> ProductContext:
    left, right = sources
    return ProductContext(precision.module, site, product, sources=lambda: (left(), right()))


def product_scale(precision: ModulePrecision, site: Site, product: Product) -> float:
    """The factor that compensates operands pre-scaled by 3/4."""
    shape = PRODUCTS[site][product]
    return post_scale(
        *(precision.operand(site, product, name) for name in (shape.left, shape.right))
    )


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TBHD: Tensor,
        k_TBGD: Tensor,
        precision: ModulePrecision,
        hook: TensorHook,
        softmax_scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_TBHD, k_TBGD)
        ctx.precision, ctx.hook, ctx.softmax_scale = precision, hook, softmax_scale
        H = q_TBHD.shape[2]
        q = by_head(_operand(precision, Site.QK, Product.FPROP, "q", -1, q_TBHD))
        k = _operand(precision, Site.QK, Product.FPROP, "k", -1, k_TBGD)
        k = by_head(expanded(k, H))
        call_context = _call_context(
            precision,
            Site.QK,
            Product.FPROP,
            lambda: by_head(q_TBHD),
            lambda: by_head(expanded(k_TBGD, H)).transpose(1, 2),
        )
        scale = softmax_scale * product_scale(precision, Site.QK, Product.FPROP)
        return multiply(call_context, q, k.transpose(1, 2), scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dS,) = grads
        q_TBHD, k_TBGD = ctx.saved_tensors
        precision: ModulePrecision = ctx.precision
        T, B, H, D = q_TBHD.shape
        by_sequence = by_sequence_layout(B)
        ctx.hook(BACKWARD, PRE, "grad_scores", by_sequence(dS))

        dS_q = _operand(precision, Site.QK, Product.DGRAD_Q, "dS", -1, dS, by_sequence)
        k = _forward_or_own(precision, Site.QK, Product.DGRAD_Q, "k", 0, -1, k_TBGD)
        call_context = _call_context(
            precision,
            Site.QK,
            Product.DGRAD_Q,
            lambda: dS,
            lambda: by_head(expanded(k_TBGD, H)),
        )
        scale = product_scale(precision, Site.QK, Product.DGRAD_Q)
        dq = multiply(call_context, dS_q, by_head(expanded(k, H)), scale)
        dq = (dq * ctx.softmax_scale).transpose(0, 1).reshape(T, B, H, D)

        dS_k = _operand(precision, Site.QK, Product.DGRAD_K, "dS", 1, dS, by_sequence)
        q = _forward_or_own(precision, Site.QK, Product.DGRAD_K, "q", 0, -1, q_TBHD)
        call_context = _call_context(
            precision,
            Site.QK,
            Product.DGRAD_K,
            lambda: dS.transpose(1, 2),
            lambda: by_head(q_TBHD),
        )
        scale = product_scale(precision, Site.QK, Product.DGRAD_K)
        dk = multiply(call_context, dS_k.transpose(1, 2), by_head(q), scale)
        dk = summed_over_group(dk * ctx.softmax_scale, B, k_TBGD.shape[2])

        dq = clipped(dq, q_TBHD, precision.operand(Site.QK, Product.FPROP, "q"), -1)
        dk = clipped(dk, k_TBGD, precision.operand(Site.QK, Product.FPROP, "k"), -1)
        ctx.hook(BACKWARD, POST, "grad_query", dq)
        ctx.hook(BACKWARD, POST, "grad_key", dk)
        return dq, dk, None, None, None


class _Context(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, P_NTT: Tensor, v_TBGD: Tensor, precision: ModulePrecision, hook: TensorHook
    ) -> Tensor:
        ctx.save_for_backward(P_NTT, v_TBGD)
        ctx.precision, ctx.hook = precision, hook
        B = v_TBGD.shape[1]
        H = P_NTT.shape[0] // B
        P = _operand(precision, Site.PV, Product.FPROP, "P", -1, P_NTT, by_sequence_layout(B))
        v = _operand(precision, Site.PV, Product.FPROP, "v", 0, v_TBGD)
        call_context = _call_context(
            precision,
            Site.PV,
            Product.FPROP,
            lambda: P_NTT,
            lambda: by_head(expanded(v_TBGD, H)),
        )
        scale = product_scale(precision, Site.PV, Product.FPROP)
        return multiply(call_context, P, by_head(expanded(v, H)), scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dO,) = grads
        P_NTT, v_TBGD = ctx.saved_tensors
        precision: ModulePrecision = ctx.precision
        _, B, G, _ = v_TBGD.shape
        H = P_NTT.shape[0] // B

        def layout(x_NTD: Tensor) -> Tensor:
            return by_token(x_NTD, B)

        dO_p = _operand(precision, Site.PV, Product.DGRAD_P, "dO", -1, dO, layout)
        v = _forward_or_own(precision, Site.PV, Product.DGRAD_P, "v", -1, 0, v_TBGD)
        call_context = _call_context(
            precision,
            Site.PV,
            Product.DGRAD_P,
            lambda: dO,
            lambda: by_head(expanded(v_TBGD, H)).transpose(1, 2),
        )
        scale = product_scale(precision, Site.PV, Product.DGRAD_P)
        dP = multiply(call_context, dO_p, by_head(expanded(v, H)).transpose(1, 2), scale)

        P = _forward_or_own(
            precision, Site.PV, Product.DGRAD_V, "P", 1, -1, P_NTT, by_sequence_layout(B)
        )
        dO_v = _operand(precision, Site.PV, Product.DGRAD_V, "dO", 1, dO, layout)
        call_context = _call_context(
            precision, Site.PV, Product.DGRAD_V, lambda: P_NTT.transpose(1, 2), lambda: dO
        )
        scale = product_scale(precision, Site.PV, Product.DGRAD_V)
        dv = multiply(call_context, P.transpose(1, 2), dO_v, scale)
        dv = summed_over_group(dv, B, G)

        dP = clipped(dP, P_NTT, precision.operand(Site.PV, Product.FPROP, "P"), -1)
        dv = clipped(dv, v_TBGD, precision.operand(Site.PV, Product.FPROP, "v"), 0)
        ctx.hook(BACKWARD, PRE, "grad_output", layout(dO))
        ctx.hook(BACKWARD, POST, "grad_attn_weights", by_sequence_layout(B)(dP))
        ctx.hook(BACKWARD, POST, "grad_value", dv)
        return dP, dv, None, None

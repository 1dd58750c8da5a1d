"""Attention by torch's fused kernel on quantised operands.

    o = softmax(mask(a q k^T)) v        q, k in blocks along head_dim, v along keys

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # a is the softmax scale

One kernel runs all products, forward and backward, and keeps S, P, dP and dS in float32 internally. Those four cannot
be quantised, and the backward pass multiplies the same q, k and v as the forward pass.
`quantexp.quant.attention.fusable` refuses every scheme that declares something else. The plain path rounds S, P, dP and
dS to the working dtype between the products; the results differ by that rounding. Memory grows with T, not with its
square. The kernel does not expose P, the gradient of P, or dS. If a hook needs one of them, this module computes it
separately, in float32 from the same operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import expanded
from quantexp.quant.hooks import BACKWARD, FORWARD, POST, PRE
from quantexp.quant.multiply import clipped_gradient, quantised_operand
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.product_context import (
    FusedContext,
    product_context,
    untracked,
)
from quantexp.quant.sites import FPROP_K, FPROP_Q, FPROP_V, Operand

#: The kernels that never store T x T; torch uses the first one that applies.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_FORWARD = (FPROP_Q, FPROP_K, FPROP_V)


def attention(call: AttentionCall, q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor) -> Tensor:
    """The output o, [T, B, H, E], differentiable in q, k and v; `require_fused` accepts the module's slots."""
    result: Tensor = _Fused.apply(q_TBHD, k_TBGD, v_TBGE, call)  # type: ignore[no-untyped-call]
    return result


def _kernel(
    q_TBHD: Tensor, k_TBGD: Tensor, v_TBGE: Tensor, softmax_scale: float, mask: Tensor | None
) -> Tensor:
    """The fused product of quantised operands, [T, B, H, E]."""
    q, k, v = _by_head((q_TBHD, k_TBGD, v_TBGE)).values()
    with sdpa_kernel(_KERNELS):
        o_BHTD = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else ~mask,
            is_causal=mask is None,
            scale=softmax_scale,
        )
    return o_BHTD.permute(2, 0, 1, 3)[..., : v_TBGE.shape[3]]


def _probabilities(
    q_TBHD: Tensor, k_TBGD: Tensor, softmax_scale: float, mask: Tensor | None
) -> Tensor:
    """P of quantised operands, float32, [B, H, T, T]."""
    q = q_TBHD.permute(1, 2, 0, 3).float()
    k = expanded(k_TBGD, q.shape[1]).permute(1, 2, 3, 0).float()
    T = q.shape[2]
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((q @ k * softmax_scale).masked_fill(mask, -torch.inf), dim=-1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TBHD: Tensor,
        k_TBGD: Tensor,
        v_TBGE: Tensor,
        call: AttentionCall,
    ) -> Tensor:
        precision = call.precision
        tensors = (q_TBHD, k_TBGD, v_TBGE)
        operands = []
        for x, slot in zip(tensors, _FORWARD, strict=True):
            operand = quantised_operand(precision, slot, x)
            operands.append(operand.detach().requires_grad_())
        q, k, v = operands
        originals = tensors if _keeps_originals(precision) else None
        call_context = FusedContext(precision.module)
        with torch.enable_grad(), product_context(call_context):
            o = _kernel(q, k, v, call.softmax_scale, call.mask)
        if call.wants(FORWARD, "attn_weights"):
            with untracked():
                P = _probabilities(q, k, call.softmax_scale, call.mask)
            call.hook(FORWARD, POST, "attn_weights", P.to(q_TBHD.dtype))
        ctx.originals, ctx.operands, ctx.o = originals, operands, o
        ctx.call_context, ctx.call = call_context, call
        return o.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dO,) = grads
        call: AttentionCall = ctx.call
        _observe_backward(ctx, dO)
        with product_context(ctx.call_context):
            gradients = torch.autograd.grad(ctx.o, ctx.operands, dO)
        ctx.o = None
        results = []
        originals = gradients if ctx.originals is None else ctx.originals
        for gradient, x, slot in zip(gradients, originals, _FORWARD, strict=True):
            results.append(clipped_gradient(call.precision, slot, gradient, x))
        call.hook(BACKWARD, PRE, "grad_output", dO)
        for gradient, name in zip(results, ("query", "key", "value"), strict=True):
            call.hook(BACKWARD, POST, f"grad_{name}", gradient)
        return *results, None


def _keeps_originals(precision: ModulePrecision) -> bool:
    """Whether an operand's gradient needs the operand before quantisation."""
    return any(precision.spec(slot).clip_gradient for slot in _FORWARD)


def _by_head(tensors: tuple[Tensor, ...]) -> dict[Operand, Tensor]:
    """Queries, keys and values in the kernel's layout, [B, H, T, D]."""
    q, k, v = tensors
    H, D = q.shape[2:]
    v = functional.pad(v, (0, D - v.shape[3]))
    heads = (q, expanded(k, H), expanded(v, H))
    operands = (Operand.Q, Operand.K, Operand.V)
    return {operand: x.permute(1, 2, 0, 3) for operand, x in zip(operands, heads, strict=True)}


@torch.no_grad()
def _observe_backward(ctx: Any, dO_TBHE: Tensor) -> None:
    """Calls the hook with what the kernel does not expose: dP = dO v^T, and dS = P (dP - sum over keys of P dP)."""
    call: AttentionCall = ctx.call
    wanted = [name for name in ("grad_scores", "grad_attn_weights") if call.wants(BACKWARD, name)]
    if not wanted:
        return
    q, k, v = ctx.operands
    with untracked():
        P = _probabilities(q, k, call.softmax_scale, call.mask)
        dO = dO_TBHE.permute(1, 2, 0, 3).float()
        dP = dO @ expanded(v, q.shape[2]).permute(1, 2, 3, 0).float()
    dS = P * (dP - (P * dP).sum(dim=-1, keepdim=True))
    for name, phase, x in (("grad_scores", PRE, dS), ("grad_attn_weights", POST, dP)):
        if name in wanted:
            call.hook(BACKWARD, phase, name, x.to(q.dtype))

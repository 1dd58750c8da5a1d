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
With `unnormalised` P of the forward product is exp(S - m), and o is divided by its row's sum; with `delta: o` the
softmax's derivative takes the row sums of dO o (`quantexp.quant.attention.row_sums`).
Blocks of v along keys span future tokens, and so does one scale per tensor: future tokens influence a token only
through that shared scale. The plain path stores S and P whole, T squared per head. It is the reference for the
`fused` and `tiled` paths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.row_sums import OutputSums, divided
from quantexp.quant.hooks import BACKWARD, POST, PRE, Layout
from quantexp.quant.multiply import Factor, clipped_gradient, multiply_operands, source_of
from quantexp.quant.sites import (
    DGRAD_K_DS,
    DGRAD_K_Q,
    DGRAD_P_DO,
    DGRAD_P_V,
    DGRAD_Q_DS,
    DGRAD_Q_K,
    DGRAD_V_DO,
    DGRAD_V_P,
    FPROP_K,
    FPROP_P,
    FPROP_Q,
    FPROP_V,
)


def scores(call: AttentionCall, q_TBHD: Tensor, k_TBGD: Tensor) -> Tensor:
    """S = a q k^T, of shape [N, T queries, T keys], differentiable in q and k.

    If ranks share the sequence, k has this rank's tokens and S all keys.
    """
    result: Tensor = _Scores.apply(q_TBHD, k_TBGD, call)  # type: ignore[no-untyped-call]
    return result


def context(
    call: AttentionCall,
    P_NTT: Tensor,
    v_TBGD: Tensor,
    exponentials: tuple[Tensor, Tensor] | None = None,
    delta: OutputSums | None = None,
) -> Tensor:
    """O = P v, of shape [N, T queries, D], differentiable in P and v.

    If ranks share the sequence, v has this rank's tokens and P all keys.

    Args:
        call: of this module.
        P_NTT: the probabilities.
        v_TBGD: the values.
        exponentials: E, [N, T, T], and l, [N, T, 1]: then O = E v / l.
        delta: receives the row sums of dO O when the backward pass begins.
    """
    result: Tensor = _Context.apply(P_NTT, v_TBGD, call, exponentials, delta)  # type: ignore[no-untyped-call]
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


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TBHD: Tensor, k_TBGD: Tensor, call: AttentionCall) -> Tensor:
        k_TBGD = call.all_keys(k_TBGD)
        ctx.save_for_backward(q_TBHD, k_TBGD)
        ctx.call = call
        H = q_TBHD.shape[2]
        return multiply_operands(
            call.precision,
            Factor(FPROP_Q, q_TBHD, by_head),
            Factor(FPROP_K, k_TBGD, lambda k: by_head(expanded(k, H)).transpose(1, 2)),
            scale=call.softmax_scale,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dS,) = grads
        q_TBHD, k_TBGD = ctx.saved_tensors
        call: AttentionCall = ctx.call
        precision = call.precision
        T, B, H, D = q_TBHD.shape
        by_sequence = by_sequence_layout(B)
        call.hook(BACKWARD, PRE, "grad_scores", by_sequence(dS))
        dq = multiply_operands(
            precision,
            Factor(DGRAD_Q_DS, dS, captured=by_sequence),
            Factor(
                DGRAD_Q_K,
                source_of(precision, DGRAD_Q_K, k_TBGD),
                lambda k: by_head(expanded(k, H)),
            ),
        )
        dq = (dq * call.softmax_scale).transpose(0, 1).reshape(T, B, H, D)
        dk = multiply_operands(
            precision,
            Factor(DGRAD_K_DS, dS, _transposed, by_sequence),
            Factor(DGRAD_K_Q, source_of(precision, DGRAD_K_Q, q_TBHD), by_head),
            is_summed=call.share is not None,
        )
        dk = summed_over_group(dk * call.softmax_scale, B, k_TBGD.shape[2])
        dq = clipped_gradient(precision, FPROP_Q, dq, q_TBHD)
        dk = call.own_keys(clipped_gradient(precision, FPROP_K, dk, k_TBGD), k_TBGD)
        call.hook(BACKWARD, POST, "grad_query", dq)
        call.hook(BACKWARD, POST, "grad_key", dk)
        return dq, dk, None


class _Context(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        P_NTT: Tensor,
        v_TBGD: Tensor,
        call: AttentionCall,
        exponentials: tuple[Tensor, Tensor] | None,
        delta: OutputSums | None,
    ) -> Tensor:
        v_TBGD = call.all_keys(v_TBGD)
        ctx.call, ctx.delta = call, delta
        B = v_TBGD.shape[1]
        H = P_NTT.shape[0] // B
        multiplied, sums = (P_NTT, None) if exponentials is None else exponentials
        O_NTD = multiply_operands(
            call.precision,
            Factor(FPROP_P, multiplied, captured=by_sequence_layout(B)),
            Factor(FPROP_V, v_TBGD, lambda v: by_head(expanded(v, H))),
        )
        if sums is not None:
            O_NTD = divided(O_NTD, sums)
        ctx.save_for_backward(P_NTT, v_TBGD, *(() if delta is None else (O_NTD,)))
        return O_NTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dO,) = grads
        P_NTT, v_TBGD, *output = ctx.saved_tensors
        if ctx.delta is not None:
            ctx.delta.see(dO, *output)
        call: AttentionCall = ctx.call
        precision = call.precision
        _, B, G, _ = v_TBGD.shape
        H = P_NTT.shape[0] // B
        by_sequence = by_sequence_layout(B)

        def layout(x_NTD: Tensor) -> Tensor:
            return by_token(x_NTD, B)

        dP = multiply_operands(
            precision,
            Factor(DGRAD_P_DO, dO, captured=layout),
            Factor(
                DGRAD_P_V,
                source_of(precision, DGRAD_P_V, v_TBGD),
                lambda v: by_head(expanded(v, H)).transpose(1, 2),
            ),
        )
        dv = multiply_operands(
            precision,
            Factor(DGRAD_V_P, P_NTT, _transposed, by_sequence),
            Factor(DGRAD_V_DO, dO, captured=layout),
            is_summed=call.share is not None,
        )
        dv = summed_over_group(dv, B, G)
        dP = clipped_gradient(precision, FPROP_P, dP, P_NTT)
        dv = call.own_keys(clipped_gradient(precision, FPROP_V, dv, v_TBGD), v_TBGD)
        call.hook(BACKWARD, PRE, "grad_output", layout(dO))
        call.hook(BACKWARD, POST, "grad_attn_weights", by_sequence(dP))
        call.hook(BACKWARD, POST, "grad_value", dv)
        return dP, dv, None, None, None


def _transposed(x_NTT: Tensor) -> Tensor:
    return x_NTT.transpose(1, 2)

"""Attention's softmax as flash attention divides it: after the product with v, and by dO and o in its derivative.

    forward     m = max_k S     E = exp(S - m)     l = sum_k E     o = (E v) / l      in place of (E / l) v
    backward    dS = P (dP - delta)     delta = sum_e dO o                            in place of sum_k P dP

    # B sequences, H query heads, R queries, K keys, E head_dim of values, N = B*H

Both are equal to the softmax in exact arithmetic. E is float32 and rounded once to the working dtype, l is a sum of E
before that in float32, and the product is rounded to the working dtype before it is divided in float32 and rounded
again. The largest score of a row has E = 1. If several scores are that large, `max_factor` (beta) takes another m: beta
times it if it is positive, 0 if it is negative (arXiv 2510.04212, algorithm 1), so that no E is 1. Where all E of a row
underflow, o is 0 or NaN: a large beta with large scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: The score of a hidden key, as Megatron sets it.
HIDDEN_SCORE = -10000.0


class Exponentials(nn.Module):
    """E and l of rows of scores; a module, so that hooks see both."""

    @torch.no_grad()
    def forward(
        self, S_BHRK: Tensor, hidden: Tensor | None, max_factor: float | None
    ) -> tuple[Tensor, Tensor]:
        """E, [B, H, R, K] in the dtype of S, and l, [B, H, R, 1] in float32.

        Args:
            S_BHRK: unchanged.
            hidden: True where a query does not see a key; None means causal, of as many queries as keys.
            max_factor: beta; None leaves m the maximum.
        """
        S = masked(S_BHRK, hidden)
        m = S.amax(dim=-1, keepdim=True)
        if max_factor is not None:
            is_repeated = (m == S).sum(dim=-1, keepdim=True) > 1
            raised = torch.where(m > 0, m * max_factor, torch.zeros_like(m))
            m = torch.where(is_repeated, raised, m)
        E = S.sub_(m).exp_()
        return E.to(S_BHRK.dtype), E.sum(dim=-1, keepdim=True)


def masked(S_BHRK: Tensor, hidden: Tensor | None) -> Tensor:
    """A float32 copy of scores with that of hidden keys."""
    if hidden is None:
        R, K = S_BHRK.shape[2:]
        hidden = torch.ones(R, K, dtype=torch.bool, device=S_BHRK.device).triu(1)
    return S_BHRK.float().masked_fill(hidden, HIDDEN_SCORE)


def divided(product_NRE: Tensor, sums_NR1: Tensor) -> Tensor:
    """E v / l, in the dtype of the product."""
    return (product_NRE.float() / sums_NR1).to(product_NRE.dtype)


@dataclass
class OutputSums:
    """delta of one call's rows, [N, R, 1] in float32; None until the backward pass has dO."""

    value: Tensor | None = None

    def see(self, dO_NRE: Tensor, o_NRE: Tensor) -> None:
        """Compute it of dO and o."""
        self.value = (dO_NRE.float() * o_NRE.float()).sum(dim=-1, keepdim=True)


def with_output_sums(
    S_BHRK: Tensor, P_BHRK: Tensor, hidden: Tensor | None, delta: OutputSums
) -> Tensor:
    """P, whose derivative for S subtracts `delta`; P is the softmax of S, and no part of its graph."""
    result: Tensor = _OfOutputSums.apply(S_BHRK, P_BHRK, hidden, delta)  # type: ignore[no-untyped-call]
    return result


class _OfOutputSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, S_BHRK: Tensor, P_BHRK: Tensor, hidden: Tensor | None, delta: OutputSums
    ) -> Tensor:
        ctx.save_for_backward(S_BHRK, hidden)
        ctx.delta = delta
        return P_BHRK.view_as(P_BHRK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dP,) = grads
        S_BHRK, hidden = ctx.saved_tensors
        delta = ctx.delta.value
        assert delta is not None, "dO of a call comes before the gradient of its P"
        P = torch.softmax(masked(S_BHRK, hidden), dim=-1)
        dS = P.mul_(dP.float().sub_(delta.view(*dP.shape[:-1], 1)))
        return dS.to(S_BHRK.dtype), None, None, None

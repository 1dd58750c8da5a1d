"""Scores, probabilities and their gradients of one tile on a GPU, in Triton, rounded where the torch tiles round.

    S = round(a q k^T)                                 -10000 where a query does not see a key
    p = exp(S - m) / l        P = round(p)             m, l: the largest of a row, and the sum of exp(S - m) over it
    dP = round(dO v^T)        dS = round((dP - d) p)   d: the sum of dP p over a row; 0 where a key is hidden

The softmax is in float32, as the stock one is; its backward pass multiplies p, not P. 1 / l is computed once per row
(`inverse`). Keys from T on get a score of -inf and do not contribute to the sum. Queries from T on see no key and
their p is 0, so blocks along queries that extend past the end contain zeros there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.quant.attention.kernels.triton_tiles import multiplied, rounded

#: Megatron's score of a hidden key.
UNSEEN = tl.constexpr(-10000.0)


@triton.jit
def hidden_tile(of_p, b, queries, keys):
    """Where a query does not see a key, [R, K]: by the mask, [B, T, T] with its strides, or for later keys."""
    T = of_p.T
    if of_p.mask is None:
        return keys[None, :] > tl.where(queries < T, queries, -1)[:, None]
    else:
        mask = of_p.mask
        at = queries.to(tl.int64)[:, None] * mask[2] + keys[None, :]
        inside = (queries < T)[:, None] & (keys < T)[None, :]
        return tl.load(mask[0] + b.to(tl.int64) * mask[1] + at, mask=inside, other=1) != 0


@triton.jit
def scores(of_p, q_RW, k_KW, hidden, keys, IS_INTERPRETED: tl.constexpr):
    """S, [R, K]."""
    zeros = tl.zeros((q_RW.shape[0], k_KW.shape[0]), tl.float32)
    S = multiplied(q_RW, tl.trans(k_KW), zeros, q_RW.dtype, IS_INTERPRETED)
    S = rounded(S * of_p.a, q_RW.dtype, IS_INTERPRETED)
    unseen = tl.where(keys < of_p.T, UNSEEN, float("-inf"))
    return tl.where(hidden, unseen[None, :], S)


@triton.jit
def probabilities(S, m_R, inverse_R):
    """p, [R, K], float32."""
    return tl.exp(S - m_R[:, None]) * inverse_R[:, None]


@triton.jit
def gradient_of_p(of_dS, dO_RW, v_KW, IS_INTERPRETED: tl.constexpr):
    """dP, [R, K]; its factor compensates operands with `pre_scale`."""
    zeros = tl.zeros((dO_RW.shape[0], v_KW.shape[0]), tl.float32)
    dP = multiplied(dO_RW, tl.trans(v_KW), zeros, dO_RW.dtype, IS_INTERPRETED)
    return rounded(dP * of_dS.scale_dP, dO_RW.dtype, IS_INTERPRETED)


@triton.jit
def gradient_of_s(dP, p, d_R, hidden, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """dS, [R, K]."""
    dS = tl.where(hidden, 0.0, (dP - d_R[:, None]) * p)
    return rounded(dS, DTYPE, IS_INTERPRETED)

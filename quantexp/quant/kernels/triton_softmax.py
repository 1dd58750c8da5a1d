"""Scores, probabilities and their gradients of one tile on a GPU, in Triton, rounded where the torch tiles round.

    S = round(a q k^T)                                 where a query does not see a key, -10000 in its place
    p = exp(S - m) / l        P = round(p)             m, l: the largest of a row, and the sum of exp(S - m) over it
    dP = round(dO v^T)        dS = round((dP - d) p)   d: the sum of dP p over a row; 0 where a key is not seen

The softmax is in float32, as the stock one is; p is what its backward multiplies, not P. 1 / l is made once a row
(`inverse`). What no key's place has, from T on, is as far below all scores as can be, and has no part in the sum; rows
from T on see nothing, and their p is 0, so that blocks along queries that end short have zeros after their end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.quant.kernels.triton_tiles import multiplied, rounded

#: Megatron's stand-in for the score of what a query does not see.
UNSEEN = tl.constexpr(-10000.0)


@triton.jit
def hidden_tile(mask, b, queries, keys, T, HAS_MASK: tl.constexpr):
    """Where a query does not see a key, [R, K]: by the mask, [B, T, T] with its strides, or what is later."""
    if HAS_MASK:
        at = queries.to(tl.int64)[:, None] * mask[2] + keys[None, :]
        inside = (queries < T)[:, None] & (keys < T)[None, :]
        return tl.load(mask[0] + b.to(tl.int64) * mask[1] + at, mask=inside, other=1) != 0
    else:
        return keys[None, :] > tl.where(queries < T, queries, -1)[:, None]


@triton.jit
def scores(q_RW, k_KW, hidden, keys, T, a, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """S, [R, K]."""
    zeros = tl.zeros((q_RW.shape[0], k_KW.shape[0]), tl.float32)
    S = multiplied(q_RW, tl.trans(k_KW), zeros, DTYPE, IS_INTERPRETED)
    S = rounded(S * a, DTYPE, IS_INTERPRETED)
    unseen = tl.where(keys < T, UNSEEN, float("-inf"))
    return tl.where(hidden, unseen[None, :], S)


@triton.jit
def probabilities(S, m_R, inverse_R):
    """p, [R, K], float32."""
    return tl.exp(S - m_R[:, None]) * inverse_R[:, None]


@triton.jit
def gradient_of_p(dO_RW, v_KW, scale, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """dP, [R, K]; `scale` makes up for operands of which only 3/4 was rounded."""
    zeros = tl.zeros((dO_RW.shape[0], v_KW.shape[0]), tl.float32)
    dP = multiplied(dO_RW, tl.trans(v_KW), zeros, DTYPE, IS_INTERPRETED)
    return rounded(dP * scale, DTYPE, IS_INTERPRETED)


@triton.jit
def gradient_of_s(dP, p, d_R, hidden, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """dS, [R, K]."""
    dS = tl.where(hidden, 0.0, (dP - d_R[:, None]) * p)
    return rounded(dS, DTYPE, IS_INTERPRETED)


@triton.jit
def recomputed(
    q_RW,
    k_KW,
    v_KW,
    dO_RW,
    hidden,
    keys,
    T,
    m_R,
    inverse_R,
    a,
    scale_dP,
    DTYPE: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The probabilities p and dP, each [R, K], as every pass of the backward makes them."""
    S = scores(q_RW, k_KW, hidden, keys, T, a, DTYPE, IS_INTERPRETED)
    dP = gradient_of_p(dO_RW, v_KW, scale_dP, DTYPE, IS_INTERPRETED)
    return probabilities(S, m_R, inverse_R), dP

"""The forward pass of tiled attention on a GPU, in Triton: o = P v, with S in on-chip memory only.

    softmax_rows    m and 1 / l of every row           reads q once, k once per tile of queries
    forward         o                                  the same, and v as often as k; writes o

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # R queries of a tile, K keys of a tile; one program processes a tile of queries of one head
    # of_p and CONST are OfP and Constants of `arguments`

S is computed twice, because P must be normalised and rounded before it is quantised: 3 products of T x T; the plain
path computes 2, and writes and reads S and P. The backward pass needs only m and l, 4 bytes each per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.quant.attention.kernels.triton_softmax import hidden_tile, probabilities, scores
from quantexp.quant.attention.kernels.triton_tiles import (
    multiplied,
    of_row,
    quantised_tile,
    rounded,
    store_tile,
    tile_of,
)


@triton.jit
def of_program(of_p, LENGTH: tl.constexpr):
    """A program's row of [N, T], sequence, head and first token; the last tiles, with most visible keys, run first."""
    tiles = tl.cdiv(of_p.T, LENGTH)
    n = tl.program_id(0) // tiles
    first = (tiles - 1 - tl.program_id(0) % tiles) * LENGTH
    return n, n // of_p.H, n % of_p.H, first


@triton.jit
def last_key(of_p, first, ROWS: tl.constexpr):
    """The end of the keys for a tile of queries: under a causal mask, that of its last query."""
    return tl.minimum(of_p.T, first + ROWS) if of_p.mask is None else of_p.T


@triton.jit
def scores_of_keys(of_p, b, h, queries, q_RW, keys, CONST: tl.constexpr):
    """S of a tile of queries and these keys, [R, K]."""
    k_KW = tile_of(of_p.k, b, h // of_p.SHARE, keys, of_p.T, CONST.D, CONST.PADDED_D)
    hidden = hidden_tile(of_p, b, queries, keys)
    return scores(of_p, q_RW, k_KW, hidden, keys, CONST.IS_INTERPRETED)


@triton.jit
def softmax_rows(of_p, CONST: tl.constexpr):
    """m and 1 / l of every row in a tile of queries."""
    n, b, h, first = of_program(of_p, CONST.ROWS)
    queries = first + tl.arange(0, CONST.ROWS)
    q_RW = tile_of(of_p.q, b, h, queries, of_p.T, CONST.D, CONST.PADDED_D)
    m = tl.full((CONST.ROWS,), float("-inf"), tl.float32)
    total = tl.full((CONST.ROWS,), 0.0, tl.float32)
    for key in range(0, last_key(of_p, first, CONST.ROWS), CONST.KEYS):
        keys = key + tl.arange(0, CONST.KEYS)
        S = scores_of_keys(of_p, b, h, queries, q_RW, keys, CONST)
        larger = tl.maximum(m, tl.max(S, 1))
        total = total * tl.exp(m - larger) + tl.sum(tl.exp(S - larger[:, None]), 1)
        m = larger
    at = n.to(tl.int64) * of_p.T + queries
    tl.store(of_p.m_NT + at, m, mask=queries < of_p.T)
    tl.store(of_p.inverse_NT + at, tl.div_rn(1.0, total), mask=queries < of_p.T)


@triton.jit
def forward(of_p, v, o, scale_P, scale_o, HOW_P: tl.constexpr, CONST: tl.constexpr):
    """The output of a tile of queries, rounded once; `scale_o` compensates operands pre-scaled by 3/4."""
    n, b, h, first = of_program(of_p, CONST.ROWS)
    queries = first + tl.arange(0, CONST.ROWS)
    m, inverse = of_row(of_p.m_NT, n, queries, of_p.T), of_row(of_p.inverse_NT, n, queries, of_p.T)
    q_RW = tile_of(of_p.q, b, h, queries, of_p.T, CONST.D, CONST.PADDED_D)
    DTYPE: tl.constexpr = q_RW.dtype
    total = tl.full((CONST.ROWS, CONST.PADDED_E), 0.0, tl.float32)
    for key in range(0, last_key(of_p, first, CONST.ROWS), CONST.KEYS):
        keys = key + tl.arange(0, CONST.KEYS)
        S = scores_of_keys(of_p, b, h, queries, q_RW, keys, CONST)
        P = rounded(probabilities(S, m, inverse), DTYPE, CONST.IS_INTERPRETED)
        P = quantised_tile(P, scale_P, HOW_P, DTYPE, CONST.IS_INTERPRETED)
        v_KW = tile_of(v, b, h // of_p.SHARE, keys, of_p.T, CONST.E, CONST.PADDED_E)
        total = multiplied(P, v_KW, total, DTYPE, CONST.IS_INTERPRETED)
    result = rounded(total * scale_o, DTYPE, CONST.IS_INTERPRETED)
    store_tile(o, b, h, queries, of_p.T, result, CONST.E, CONST.PADDED_E)

"""The forward of attention in tiles on a GPU, in Triton: o = P v, of S in on-chip memory alone.

    softmax_rows    m and 1 / l of every row           reads q once, k once for each tile of queries
    forward         o                                  the same, and v as often as k; writes o

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values
    # R queries of a tile, K keys of a tile; a program has a tile of queries of one head

S is made twice, as P has to be normalised and rounded before it is quantised: 3 products of T x T where the plain path
makes 2 and writes and reads S and P. m and l, 4 bytes each a row, are all that the backward is left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.quant.kernels.triton_softmax import hidden_tile, probabilities, scores
from quantexp.quant.kernels.triton_tiles import (
    held_tile,
    multiplied,
    rounded,
    store_tile,
    tile_of,
)


@triton.jit
def of_program(T, H, LENGTH: tl.constexpr):
    """A program's row of [N, T], sequence, head and first token: the last first, which see most keys."""
    tiles = tl.cdiv(T, LENGTH)
    n = tl.program_id(0) // tiles
    first = (tiles - 1 - tl.program_id(0) % tiles) * LENGTH
    return n, n // H, n % H, first


@triton.jit
def last_key(first, T, ROWS: tl.constexpr, HAS_MASK: tl.constexpr):
    """The end of the keys that a tile of queries is multiplied with: under a causal mask its own last query's."""
    return T if HAS_MASK else tl.minimum(T, first + ROWS)


@triton.jit
def softmax_rows(
    q,
    k,
    mask,
    m_NT,
    inverse_NT,
    T,
    H,
    SHARE,
    a,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The rows' m and 1 / l of a tile of queries; SHARE query heads share a head of keys."""
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    n, b, h, first = of_program(T, H, ROWS)
    queries = first + tl.arange(0, ROWS)
    q_RW = tile_of(q, b, h, queries, T, D, PADDED_D)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for key in range(0, last_key(first, T, ROWS, HAS_MASK), KEYS):
        keys = key + tl.arange(0, KEYS)
        k_KW = tile_of(k, b, h // SHARE, keys, T, D, PADDED_D)
        hidden = hidden_tile(mask, b, queries, keys, T, HAS_MASK)
        S = scores(q_RW, k_KW, hidden, keys, T, a, DTYPE, IS_INTERPRETED)
        larger = tl.maximum(m, tl.max(S, 1))
        total = total * tl.exp(m - larger) + tl.sum(tl.exp(S - larger[:, None]), 1)
        m = larger
    at = n.to(tl.int64) * T + queries
    tl.store(m_NT + at, m, mask=queries < T)
    tl.store(inverse_NT + at, tl.div_rn(1.0, total), mask=queries < T)


@triton.jit
def forward(
    q,
    k,
    v,
    mask,
    o,
    m_NT,
    inverse_NT,
    scale_P,
    T,
    H,
    SHARE,
    a,
    scale_o,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HOW_P: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The output of a tile of queries, rounded once; `scale_o` makes up for operands of which only 3/4 was rounded."""
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    n, b, h, first = of_program(T, H, ROWS)
    queries = first + tl.arange(0, ROWS)
    at = n.to(tl.int64) * T + queries
    m = tl.load(m_NT + at, mask=queries < T, other=0.0)
    inverse = tl.load(inverse_NT + at, mask=queries < T, other=0.0)
    q_RW = tile_of(q, b, h, queries, T, D, PADDED_D)
    total = tl.zeros((ROWS, PADDED_E), tl.float32)
    for key in range(0, last_key(first, T, ROWS, HAS_MASK), KEYS):
        keys = key + tl.arange(0, KEYS)
        k_KW = tile_of(k, b, h // SHARE, keys, T, D, PADDED_D)
        hidden = hidden_tile(mask, b, queries, keys, T, HAS_MASK)
        S = scores(q_RW, k_KW, hidden, keys, T, a, DTYPE, IS_INTERPRETED)
        P = rounded(probabilities(S, m, inverse), DTYPE, IS_INTERPRETED)
        P = held_tile(P, scale_P, HOW_P, DTYPE, IS_INTERPRETED)
        v_KW = tile_of(v, b, h // SHARE, keys, T, E, PADDED_E)
        total = multiplied(P, v_KW, total, DTYPE, IS_INTERPRETED)
    result = rounded(total * scale_o, DTYPE, IS_INTERPRETED)
    store_tile(o, b, h, queries, T, result, E, PADDED_E)

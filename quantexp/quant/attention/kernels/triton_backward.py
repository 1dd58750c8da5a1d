"""The backward pass of tiled attention on a GPU, in Triton: dq, dk and dv, with S, P, dP and dS in on-chip memory only.

    gradient_rows    d of every row                one program per tile of queries: reads q, dO once, k, v per tile
    gradient_amax    amax of dS, for a scale       the same
    gradient_of_q    dq = a dS k                   the same, and another copy of k; writes dq
    gradient_of_kv   dk = a dS^T q, dv = P^T dO    one program per tile of keys: reads k, v once, q, dO per tile, and
                                                   another copy of each; writes dk and dv

    # as in triton_forward; of_dS is OfDS of `arguments`

Each kernel recomputes S and dP: 9 products of T x T (11 with the amax); the plain path computes 4 and the torch tiles
5. Each sum is accumulated in float32 in one program, in the order of its tiles, and rounded once: no sum depends on the
order in which programs run. A block along keys lies in one tile, and so does a block along queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_amax import finite_magnitude
from quantexp.formats.kernels.triton_words import as_bits
from quantexp.quant.attention.kernels.triton_forward import last_key, of_program
from quantexp.quant.attention.kernels.triton_softmax import (
    gradient_of_p,
    gradient_of_s,
    hidden_tile,
    probabilities,
    scores,
)
from quantexp.quant.attention.kernels.triton_tiles import (
    multiplied,
    of_row,
    quantised_tile,
    rounded,
    store_tile,
    tile_of,
)


@triton.jit
def of_queries(of_p, of_dS, n, b, h, queries, CONST: tl.constexpr):
    """Inputs to P and dP of a tile of queries: q, dO, m and 1 / l."""
    T = of_p.T
    m, inverse = of_row(of_p.m_NT, n, queries, T), of_row(of_p.inverse_NT, n, queries, T)
    q_RW = tile_of(of_p.q, b, h, queries, T, CONST.D, CONST.PADDED_D)
    dO_RW = tile_of(of_dS.dO, b, h, queries, T, CONST.E, CONST.PADDED_E)
    return q_RW, dO_RW, m, inverse


@triton.jit
def of_keys(of_p, of_dS, b, h, keys, CONST: tl.constexpr):
    """Inputs to P and dP of a tile of keys: k and v."""
    k_KW = tile_of(of_p.k, b, h // of_p.SHARE, keys, of_p.T, CONST.D, CONST.PADDED_D)
    v_KW = tile_of(of_dS.v, b, h // of_p.SHARE, keys, of_p.T, CONST.E, CONST.PADDED_E)
    return k_KW, v_KW


@triton.jit
def recomputed(of_p, of_dS, of_tile, of_k, b, queries, keys, CONST: tl.constexpr):
    """Probabilities p and dP, each [R, K], and where they are 0; every kernel of the backward pass calls this."""
    q_RW, dO_RW, m, inverse = of_tile
    k_KW, v_KW = of_k
    hidden = hidden_tile(of_p, b, queries, keys)
    S = scores(of_p, q_RW, k_KW, hidden, keys, CONST.IS_INTERPRETED)
    dP = gradient_of_p(of_dS, dO_RW, v_KW, CONST.IS_INTERPRETED)
    return probabilities(S, m, inverse), dP, hidden


@triton.jit
def gradient_rows(of_p, of_dS, CONST: tl.constexpr):
    """The sum of dP p over the keys, d, of a tile of queries."""
    n, b, h, first = of_program(of_p, CONST.ROWS)
    queries = first + tl.arange(0, CONST.ROWS)
    rows = of_queries(of_p, of_dS, n, b, h, queries, CONST)
    total = tl.full((CONST.ROWS,), 0.0, tl.float32)
    for key in range(0, last_key(of_p, first, CONST.ROWS), CONST.KEYS):
        keys = key + tl.arange(0, CONST.KEYS)
        columns = of_keys(of_p, of_dS, b, h, keys, CONST)
        p, dP, _ = recomputed(of_p, of_dS, rows, columns, b, queries, keys, CONST)
        total += tl.sum(dP * p, 1)
    tl.store(of_dS.d_NT + n.to(tl.int64) * of_p.T + queries, total, mask=queries < of_p.T)


@triton.jit
def gradient_amax(of_p, of_dS, amax_bits, CONST: tl.constexpr):
    """Raise the int32 at `amax_bits`, initially 0, to the bits of the largest finite magnitude of dS."""
    n, b, h, first = of_program(of_p, CONST.ROWS)
    queries = first + tl.arange(0, CONST.ROWS)
    d = of_row(of_dS.d_NT, n, queries, of_p.T)
    rows = of_queries(of_p, of_dS, n, b, h, queries, CONST)
    largest = tl.full((CONST.ROWS,), 0, tl.int32)
    for key in range(0, last_key(of_p, first, CONST.ROWS), CONST.KEYS):
        keys = key + tl.arange(0, CONST.KEYS)
        columns = of_keys(of_p, of_dS, b, h, keys, CONST)
        p, dP, hidden = recomputed(of_p, of_dS, rows, columns, b, queries, keys, CONST)
        dS = gradient_of_s(dP, p, d, hidden, rows[0].dtype, CONST.IS_INTERPRETED)
        largest = tl.maximum(largest, tl.max(finite_magnitude(as_bits(dS)), 1))
    tl.atomic_max(amax_bits, tl.max(largest, 0), sem="relaxed")


@triton.jit
def gradient_of_q(
    of_p, of_dS, k_dS, dq, scale_dS, scale_dq, HOW_dS: tl.constexpr, CONST: tl.constexpr
):
    """The product dS k of a tile of queries, before the factor a; `k_dS` is k quantised for this product."""
    n, b, h, first = of_program(of_p, CONST.ROWS)
    queries = first + tl.arange(0, CONST.ROWS)
    d = of_row(of_dS.d_NT, n, queries, of_p.T)
    rows = of_queries(of_p, of_dS, n, b, h, queries, CONST)
    DTYPE: tl.constexpr = rows[0].dtype
    total = tl.full((CONST.ROWS, CONST.PADDED_D), 0.0, tl.float32)
    for key in range(0, last_key(of_p, first, CONST.ROWS), CONST.KEYS):
        keys = key + tl.arange(0, CONST.KEYS)
        columns = of_keys(of_p, of_dS, b, h, keys, CONST)
        p, dP, hidden = recomputed(of_p, of_dS, rows, columns, b, queries, keys, CONST)
        dS = gradient_of_s(dP, p, d, hidden, DTYPE, CONST.IS_INTERPRETED)
        dS = quantised_tile(dS, scale_dS, HOW_dS, DTYPE, CONST.IS_INTERPRETED)
        operand_KW = tile_of(k_dS, b, h // of_p.SHARE, keys, of_p.T, CONST.D, CONST.PADDED_D)
        total = multiplied(dS, operand_KW, total, DTYPE, CONST.IS_INTERPRETED)
    result = rounded(total * scale_dq, DTYPE, CONST.IS_INTERPRETED)
    store_tile(dq, b, h, queries, of_p.T, result, CONST.D, CONST.PADDED_D)


@triton.jit
def gradient_of_kv(
    of_p,
    of_dS,
    q_dS,
    dO_P,
    dk,
    dv,
    scale_dS,
    scale_P,
    scale_dk,
    scale_dv,
    HOW_dS: tl.constexpr,
    HOW_P: tl.constexpr,
    CONST: tl.constexpr,
):
    """Both dS^T q, before the factor a, and P^T dO of a tile of keys for one query head.

    `q_dS` and `dO_P` are q and dO quantised for the products with dS and with P.
    """
    T = of_p.T
    tiles = tl.cdiv(T, CONST.KEYS)
    n = tl.program_id(0) // tiles
    b, h = n // of_p.H, n % of_p.H
    key = tl.program_id(0) % tiles * CONST.KEYS
    keys = key + tl.arange(0, CONST.KEYS)
    columns = of_keys(of_p, of_dS, b, h, keys, CONST)
    DTYPE: tl.constexpr = columns[0].dtype
    sum_k = tl.full((CONST.KEYS, CONST.PADDED_D), 0.0, tl.float32)
    sum_v = tl.full((CONST.KEYS, CONST.PADDED_E), 0.0, tl.float32)
    begin = key // CONST.ROWS * CONST.ROWS if of_p.mask is None else 0
    for first in range(begin, T, CONST.ROWS):
        queries = first + tl.arange(0, CONST.ROWS)
        d = of_row(of_dS.d_NT, n, queries, T)
        rows = of_queries(of_p, of_dS, n, b, h, queries, CONST)
        p, dP, hidden = recomputed(of_p, of_dS, rows, columns, b, queries, keys, CONST)
        P = rounded(p, DTYPE, CONST.IS_INTERPRETED)
        P = quantised_tile(P, scale_P, HOW_P, DTYPE, CONST.IS_INTERPRETED)
        operand_RW = tile_of(dO_P, b, h, queries, T, CONST.E, CONST.PADDED_E)
        sum_v = multiplied(tl.trans(P), operand_RW, sum_v, DTYPE, CONST.IS_INTERPRETED)
        dS = gradient_of_s(dP, p, d, hidden, DTYPE, CONST.IS_INTERPRETED)
        dS = quantised_tile(dS, scale_dS, HOW_dS, DTYPE, CONST.IS_INTERPRETED)
        operand_RW = tile_of(q_dS, b, h, queries, T, CONST.D, CONST.PADDED_D)
        sum_k = multiplied(tl.trans(dS), operand_RW, sum_k, DTYPE, CONST.IS_INTERPRETED)
    result = rounded(sum_k * scale_dk, DTYPE, CONST.IS_INTERPRETED)
    store_tile(dk, b, h, keys, T, result, CONST.D, CONST.PADDED_D)
    result = rounded(sum_v * scale_dv, DTYPE, CONST.IS_INTERPRETED)
    store_tile(dv, b, h, keys, T, result, CONST.E, CONST.PADDED_E)

"""The backward of attention in tiles on a GPU, in Triton: dq, dk and dv, of S, P, dP and dS in on-chip memory alone.

    gradient_rows    d of every row                a program a tile of queries: reads q, dO once, k, v for each tile
    gradient_amax    amax of dS, for a scale       the same
    gradient_of_q    dq = a dS k                   the same, and another copy of k; writes dq
    gradient_of_kv   dk = a dS^T q, dv = P^T dO    a program a tile of keys: reads k, v once, q, dO for each tile, and
                                                   another copy of each; writes dk and dv

    # as in triton_forward

S and dP are made in each of them: 9 products of T x T (11 with the amax) where the plain path makes 4 and the torch
tiles 5. What is summed is summed in float32 in one program, in the order of its tiles, and rounded once: no sum
depends on which program is quicker. Blocks along keys lie in one tile as blocks along queries do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_amax import finite_magnitude
from quantexp.formats.kernels.triton_words import as_bits
from quantexp.quant.kernels.triton_forward import last_key, of_program
from quantexp.quant.kernels.triton_softmax import (
    gradient_of_s,
    hidden_tile,
    recomputed,
)
from quantexp.quant.kernels.triton_tiles import (
    held_tile,
    multiplied,
    rounded,
    store_tile,
    tile_of,
)


@triton.jit
def of_row(x_NT, n, queries, T):
    """One number of each row, 0 from T on."""
    return tl.load(x_NT + n.to(tl.int64) * T + queries, mask=queries < T, other=0.0)


@triton.jit
def gradient_rows(
    q,
    k,
    v,
    dO,
    mask,
    m_NT,
    inverse_NT,
    d_NT,
    T,
    H,
    SHARE,
    a,
    scale_dP,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The sum of dP p over the keys, d, of a tile of queries; v and dO as dP multiplies them."""
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    n, b, h, first = of_program(T, H, ROWS)
    queries = first + tl.arange(0, ROWS)
    m, inverse = of_row(m_NT, n, queries, T), of_row(inverse_NT, n, queries, T)
    q_RW = tile_of(q, b, h, queries, T, D, PADDED_D)
    dO_RW = tile_of(dO, b, h, queries, T, E, PADDED_E)
    total = tl.zeros((ROWS,), tl.float32)
    for key in range(0, last_key(first, T, ROWS, HAS_MASK), KEYS):
        keys = key + tl.arange(0, KEYS)
        k_KW = tile_of(k, b, h // SHARE, keys, T, D, PADDED_D)
        v_KW = tile_of(v, b, h // SHARE, keys, T, E, PADDED_E)
        hidden = hidden_tile(mask, b, queries, keys, T, HAS_MASK)
        p, dP = recomputed(
            q_RW, k_KW, v_KW, dO_RW, hidden, keys, T, m, inverse, a, scale_dP, DTYPE, IS_INTERPRETED
        )
        total += tl.sum(dP * p, 1)
    tl.store(d_NT + n.to(tl.int64) * T + queries, total, mask=queries < T)


@triton.jit
def gradient_amax(
    q,
    k,
    v,
    dO,
    mask,
    m_NT,
    inverse_NT,
    d_NT,
    amax_bits,
    T,
    H,
    SHARE,
    a,
    scale_dP,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Raise the int32 at `amax_bits`, which begins as 0, to the bits of the largest finite magnitude of dS."""
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    n, b, h, first = of_program(T, H, ROWS)
    queries = first + tl.arange(0, ROWS)
    m, inverse = of_row(m_NT, n, queries, T), of_row(inverse_NT, n, queries, T)
    d = of_row(d_NT, n, queries, T)
    q_RW = tile_of(q, b, h, queries, T, D, PADDED_D)
    dO_RW = tile_of(dO, b, h, queries, T, E, PADDED_E)
    largest = tl.zeros((ROWS,), tl.int32)
    for key in range(0, last_key(first, T, ROWS, HAS_MASK), KEYS):
        keys = key + tl.arange(0, KEYS)
        k_KW = tile_of(k, b, h // SHARE, keys, T, D, PADDED_D)
        v_KW = tile_of(v, b, h // SHARE, keys, T, E, PADDED_E)
        hidden = hidden_tile(mask, b, queries, keys, T, HAS_MASK)
        p, dP = recomputed(
            q_RW, k_KW, v_KW, dO_RW, hidden, keys, T, m, inverse, a, scale_dP, DTYPE, IS_INTERPRETED
        )
        dS = gradient_of_s(dP, p, d, hidden, DTYPE, IS_INTERPRETED)
        largest = tl.maximum(largest, tl.max(finite_magnitude(as_bits(dS)), 1))
    tl.atomic_max(amax_bits, tl.max(largest, 0), sem="relaxed")


@triton.jit
def gradient_of_q(
    q,
    k,
    v,
    dO,
    k_dS,
    mask,
    dq,
    m_NT,
    inverse_NT,
    d_NT,
    scale_dS,
    T,
    H,
    SHARE,
    a,
    scale_dP,
    scale_dq,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HOW_dS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The product dS k of a tile of queries, before the factor a; `k_dS` as it is multiplied with dS."""
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    n, b, h, first = of_program(T, H, ROWS)
    queries = first + tl.arange(0, ROWS)
    m, inverse = of_row(m_NT, n, queries, T), of_row(inverse_NT, n, queries, T)
    d = of_row(d_NT, n, queries, T)
    q_RW = tile_of(q, b, h, queries, T, D, PADDED_D)
    dO_RW = tile_of(dO, b, h, queries, T, E, PADDED_E)
    total = tl.zeros((ROWS, PADDED_D), tl.float32)
    for key in range(0, last_key(first, T, ROWS, HAS_MASK), KEYS):
        keys = key + tl.arange(0, KEYS)
        k_KW = tile_of(k, b, h // SHARE, keys, T, D, PADDED_D)
        v_KW = tile_of(v, b, h // SHARE, keys, T, E, PADDED_E)
        hidden = hidden_tile(mask, b, queries, keys, T, HAS_MASK)
        p, dP = recomputed(
            q_RW, k_KW, v_KW, dO_RW, hidden, keys, T, m, inverse, a, scale_dP, DTYPE, IS_INTERPRETED
        )
        dS = gradient_of_s(dP, p, d, hidden, DTYPE, IS_INTERPRETED)
        dS = held_tile(dS, scale_dS, HOW_dS, DTYPE, IS_INTERPRETED)
        held_KW = tile_of(k_dS, b, h // SHARE, keys, T, D, PADDED_D)
        total = multiplied(dS, held_KW, total, DTYPE, IS_INTERPRETED)
    result = rounded(total * scale_dq, DTYPE, IS_INTERPRETED)
    store_tile(dq, b, h, queries, T, result, D, PADDED_D)


@triton.jit
def gradient_of_kv(
    q,
    k,
    v,
    dO,
    q_dS,
    dO_P,
    mask,
    dk,
    dv,
    m_NT,
    inverse_NT,
    d_NT,
    scale_dS,
    scale_P,
    T,
    H,
    SHARE,
    a,
    scale_dP,
    scale_dk,
    scale_dv,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HOW_dS: tl.constexpr,
    HOW_P: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Both dS^T q, before the factor a, and P^T dO of a tile of keys for one query head.

    `q_dS` and `dO_P` are q and dO as they are multiplied with dS and with P.
    """
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    tiles = tl.cdiv(T, KEYS)
    n = tl.program_id(0) // tiles
    b, h = n // H, n % H
    key = tl.program_id(0) % tiles * KEYS
    keys = key + tl.arange(0, KEYS)
    k_KW = tile_of(k, b, h // SHARE, keys, T, D, PADDED_D)
    v_KW = tile_of(v, b, h // SHARE, keys, T, E, PADDED_E)
    sum_k = tl.zeros((KEYS, PADDED_D), tl.float32)
    sum_v = tl.zeros((KEYS, PADDED_E), tl.float32)
    for first in range(0 if HAS_MASK else key // ROWS * ROWS, T, ROWS):
        queries = first + tl.arange(0, ROWS)
        m, inverse = of_row(m_NT, n, queries, T), of_row(inverse_NT, n, queries, T)
        d = of_row(d_NT, n, queries, T)
        q_RW = tile_of(q, b, h, queries, T, D, PADDED_D)
        dO_RW = tile_of(dO, b, h, queries, T, E, PADDED_E)
        hidden = hidden_tile(mask, b, queries, keys, T, HAS_MASK)
        p, dP = recomputed(
            q_RW, k_KW, v_KW, dO_RW, hidden, keys, T, m, inverse, a, scale_dP, DTYPE, IS_INTERPRETED
        )
        P = held_tile(rounded(p, DTYPE, IS_INTERPRETED), scale_P, HOW_P, DTYPE, IS_INTERPRETED)
        held_RW = tile_of(dO_P, b, h, queries, T, E, PADDED_E)
        sum_v = multiplied(tl.trans(P), held_RW, sum_v, DTYPE, IS_INTERPRETED)
        dS = gradient_of_s(dP, p, d, hidden, DTYPE, IS_INTERPRETED)
        dS = held_tile(dS, scale_dS, HOW_dS, DTYPE, IS_INTERPRETED)
        held_RW = tile_of(q_dS, b, h, queries, T, D, PADDED_D)
        sum_k = multiplied(tl.trans(dS), held_RW, sum_k, DTYPE, IS_INTERPRETED)
    result = rounded(sum_k * scale_dk, DTYPE, IS_INTERPRETED)
    store_tile(dk, b, h, keys, T, result, D, PADDED_D)
    result = rounded(sum_v * scale_dv, DTYPE, IS_INTERPRETED)
    store_tile(dv, b, h, keys, T, result, E, PADDED_E)

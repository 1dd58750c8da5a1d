"""The low-rank part of a matrix: its projection onto a subspace that has most of it, equal bit for bit in any order.

With s [W, K], odd multiples of 1/2 up to 127.5 by the random numbers of positions (seed and offset 0), and orth(y) an
orthonormal basis of y's columns,

    q = orth(x s)
    q = orth(x orth(x^T q))      twice
    part = q (q^T x)

This is the randomised singular value decomposition of Halko, Martinsson and Tropp (SIAM Review 53, 2011), algorithms
4.4 and 5.1, as `torch.svd_lowrank` has it; singular values are not needed. Libraries round such sums and bases each
in their own way. Here every factor is first rounded to b bits below its largest magnitude (each column to its own),

    b = (52 - ceil(log2 n)) // 2      n the larger side of x

so that float64 holds every sum of n products exactly: no order, no library and no fused multiply-add decides. What
that loses stays in the remainder. `orth` subtracts from each column, twice, its projections onto those before
(Gram-Schmidt); a column of zeros stays zero.

    # R rows, W width, K rank, N rows or width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.philox import random_integers
from quantexp.quant.product_context import untracked

_EXACT_BITS = 52
_ITERATIONS = 2


def low_rank_part(x_RW: Tensor, rank: int) -> Tensor:
    """The part of rank `rank` (at most the smaller side) of a float32 matrix, float32.

    Zeros if x has a number that is not finite.

    Source: Metis (arXiv 2509.00404), whose code has two iterations too.
    """
    rank = min(rank, *x_RW.shape)
    bits = (_EXACT_BITS - math.ceil(math.log2(max(x_RW.shape)))) // 2
    x = _to_bits(torch.where(x_RW.isfinite().all(), x_RW, 0.0).double(), bits)
    numbers = random_integers(x.shape[1] * rank, 0, 0, x.device).view(-1, rank)
    with untracked():
        q_RK = _orthonormal(x @ ((numbers.double() / 2.0**16).floor() - 127.5), bits)
        for _ in range(_ITERATIONS):
            q_WK = _orthonormal(x.T @ q_RK, bits)
            q_RK = _orthonormal(x @ q_WK, bits)
        return (q_RK @ _to_bits(q_RK.T @ x, bits)).float()


def _to_bits(x: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """x at multiples of the power of two that is so many bits below its largest magnitude, along `dim` or of all."""
    amax = x.abs().amax(dim, keepdim=True) if dim is not None else x.abs().max()
    mantissa, _ = torch.frexp(amax)
    unit = torch.where(amax == 0, 1.0, amax / mantissa) / 2.0**bits
    return (x / unit).round() * unit


def _orthonormal(y_NK: Tensor, bits: int) -> Tensor:
    """An orthonormal basis of the columns, up to a rounding to so many bits."""
    q_NK = torch.zeros_like(y_NK)
    for column in range(y_NK.shape[1]):
        y_N1, before = y_NK[:, column : column + 1], q_NK[:, :column]
        for _ in range(2 if column else 0):
            y_N1 = _to_bits(y_N1, bits)
            y_N1 = y_N1 - before @ _to_bits(before.T @ y_N1, bits)
        y_N1 = _to_bits(y_N1, bits)
        norm = (y_N1 * y_N1).sum().sqrt()
        units = y_N1 / torch.where(norm == 0, 1.0, norm) * 2.0**bits
        q_NK[:, column : column + 1] = units.round() / 2.0**bits
    return q_NK

"""The low-rank part of an operand, in whole numbers: `quantexp.quant.low_rank` states what that is.

A matrix is one of whole numbers, times two to an exponent of each column or of all. Sums of their products are below
2^53, so float64 adds them up exactly.

# R rows, W width, K rank, N rows or width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantexp.proof.arithmetic.philox import random_integers


class _Whole(NamedTuple):
    """Whole numbers, float64 of at most `bits` bits, and the exponent of two of each column (int32 [1, columns])."""

    numbers: Tensor
    exponents: Tensor

    def value(self) -> Tensor:
        return torch.ldexp(self.numbers, self.exponents)


def projection(x_RW: Tensor, rank: int) -> Tensor:
    """The projection of a float32 matrix onto a subspace of so many dimensions, float32."""
    if not bool(torch.isfinite(x_RW).all()):
        return torch.zeros_like(x_RW)
    num_rows, width = x_RW.shape
    rank = min(rank, num_rows, width)
    bits = (52 - (max(num_rows, width) - 1).bit_length()) // 2
    x = _whole(x_RW.to(torch.float64), bits, by_column=False)
    across = _Whole(x.numbers.T.contiguous(), x.exponents[:, :1].expand(1, num_rows))
    at = torch.arange(width * rank, device=x_RW.device)
    start = (random_integers(at, 0, 0) >> 16).to(torch.float64).mul(2).sub(255).view(width, rank)
    halves = torch.full((1, rank), -1, dtype=torch.int32, device=x_RW.device)
    q = _basis(_times(x, _Whole(start, halves)), bits)
    for _ in range(2):
        q = _basis(_times(across, q), bits)
        q = _basis(_times(x, q), bits)
    q_KR = _Whole(q.numbers.T, torch.full((1, num_rows), -bits, device=q.numbers.device))
    onto = _whole(_times(q_KR, x), bits, by_column=False)
    return _times(q, onto).to(torch.float32)


def _times(left: _Whole, right: _Whole) -> Tensor:
    """The exact product; all columns of `left` have one exponent."""
    sums = torch.matmul(left.numbers, right.numbers)
    return torch.ldexp(sums, right.exponents + left.exponents[:, :1])


def _whole(x: Tensor, bits: int, *, by_column: bool) -> _Whole:
    """The nearest of so many bits below the largest magnitude of each column, or of all."""
    largest = x.abs().max(dim=0, keepdim=True).values
    if not by_column:
        largest = largest.max().expand(1, x.shape[1])
    exponents = torch.where(largest == 0, 0, torch.frexp(largest).exponent - bits)
    return _Whole(torch.ldexp(x, -exponents).round(), exponents)


def _basis(y_NK: Tensor, bits: int) -> _Whole:
    """Columns of length 1 and orthogonal to those before, in multiples of 2^-bits."""
    basis: list[Tensor] = []
    for y_N in y_NK.unbind(1):
        for _ in range(2 if basis else 0):
            y_N = _whole(y_N[:, None], bits, by_column=True).value()[:, 0]
            inner = torch.stack([(each * y_N).sum() for each in basis])
            inner = torch.ldexp(inner, torch.tensor(-bits, device=inner.device))
            sizes = _whole(inner[:, None], bits, by_column=True).value()[:, 0]
            taken = torch.stack([q * size for q, size in zip(basis, sizes, strict=True)]).sum(0)
            y_N = y_N - torch.ldexp(taken, torch.tensor(-bits, device=taken.device))
        y_N = _whole(y_N[:, None], bits, by_column=True).value()[:, 0]
        length = y_N.square().sum().sqrt()
        quotient = torch.zeros_like(y_N) if length == 0 else y_N / length
        basis.append(torch.ldexp(quotient, torch.tensor(bits, device=y_N.device)).round())
    exponents = torch.full((1, len(basis)), -bits, dtype=torch.int32, device=y_NK.device)
    return _Whole(torch.stack(basis, dim=1), exponents)

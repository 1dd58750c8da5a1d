"""Operands that are sums of parts.

    x  =  p_1 + ... + p_n + r + e_1 + ... + e_m  (+ what is left of the error)
    p_i   what a part takes of x - p_1 - ... - p_(i-1), rounded to the part's format
    r     x - p_1 - ... - p_n, rounded to the slot's format
    e_j   what a part takes of the error x - p_1 - ... - r - ..., rounded to its format

Differences are those of float32 tensors, and subtract what was rounded. The product is the sum of the products of all
pairs of parts: one matrix product over a longer axis, in which each part lies beside each of the other operand. It
accumulates in fp32 and is rounded once.

    mean       exact sums, so that they are equal in any order: see `mean`
    channels   all whose sum of squares along the axis is at least that of the number-th largest; exact sums too
    elements   all whose magnitude is at least that of the number-th largest
    low_rank   its projection onto so many dimensions: see `quantexp.quant.low_rank`

A part without a format is left out of the product: the mean of k over keys, which adds the same number to all scores of
a query, and so changes nothing after the softmax (SageAttention, arXiv 2410.02367; SageBwd, arXiv 2603.02170).

Of equal ones all are taken, so that no order decides. NaN or Inf makes the mean of its channel NaN; where it is in an
operand, no channel and no low rank of that is taken. The mean: Averis (arXiv 2603.10444); channels of the error: CHON
(arXiv 2602.02047); the low rank: Metis (arXiv 2509.00404).

    # R rows (all tokens of a micro-batch, or a weight's output width), W width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantexp.formats.spec import Part
from quantexp.formats.types import Axis, Take
from quantexp.quant.low_rank import low_rank_part

#: Bits of a sum that float64 holds exactly.
_EXACT_BITS = 52


def take_part(x: Tensor, part: Part) -> Tensor:
    """What a part takes out of x (float32), in its shape; zero elsewhere.

    x is [tokens, ..., width], or a weight [output width, input width], as `part.spec.weight` says. A mean over keys is
    that of each sequence and head.
    """
    if not x.numel():
        return torch.zeros_like(x)
    if part.along is Axis.KEYS:
        x_RW = x.reshape(len(x), -1)
        return mean(x_RW, 0).expand_as(x_RW).reshape(x.shape)
    x_RW = x.reshape(-1, x.shape[-1])
    if part.take is Take.ELEMENTS:
        chosen = _among_largest(x_RW.abs().flatten(), part).view_as(x_RW)
        return torch.where(chosen, x_RW, 0.0).view_as(x)
    if part.take is Take.LOW_RANK:
        return low_rank_part(x_RW, _number(part, min(x_RW.shape))).view_as(x)
    dim = 0 if _is_over_rows(part) else 1
    if part.take is Take.MEAN:
        return mean(x_RW, dim).expand_as(x_RW).reshape(x.shape)
    squares = x_RW.double().square()
    norms = _exact_sum(squares, dim, squares.amax()).squeeze(dim)
    chosen = _among_largest(norms, part).unsqueeze(dim)
    return torch.where(chosen, x_RW, 0.0).view_as(x)


def mean(x_RW: Tensor, dim: int) -> Tensor:
    """The mean along a dimension, which keeps an extent of 1; float32.

    Each element is rounded to a multiple of 2^(e - 52 + ceil(log2 n)), the multiples are added exactly, and their sum
    divided by n in float64. e is the exponent of the largest of these n magnitudes.
    """
    wide = x_RW.double()
    amax = wide.abs().amax(dim, keepdim=True)
    result = _exact_sum(wide, dim, amax) / x_RW.shape[dim]
    return torch.where(amax.isfinite(), result, math.nan).float()


def _exact_sum(x: Tensor, dim: int, amax: Tensor) -> Tensor:
    """The sum of multiples of one power of two: no partial sum, in any order, is above 2^52 of them."""
    mantissa, _ = torch.frexp(amax)
    power = torch.where(amax == 0, 1.0, amax / mantissa)
    unit = power / 2.0 ** (_EXACT_BITS - math.ceil(math.log2(x.shape[dim])))
    return (x / unit).round().sum(dim, keepdim=True) * unit


def _among_largest(magnitudes: Tensor, part: Part) -> Tensor:
    """Whether each is among the largest, of as many as the part takes."""
    return magnitudes >= magnitudes.topk(_number(part, magnitudes.numel())).values[-1]


def _number(part: Part, total: int) -> int:
    number = round(part.share * total) if part.share is not None else part.number
    assert number is not None
    return min(max(number, 1), total)


def _is_over_rows(part: Part) -> bool:
    is_weight = part.spec is not None and part.spec.weight
    return part.along is Axis.TOKENS or (is_weight and part.along is Axis.OUTPUT_WIDTH)


def every_pair(a: Tensor, b: Tensor, num_a: int, num_b: int) -> tuple[Tensor, Tensor]:
    """Operands [..., num_a K] and [num_b K, N] over num_a num_b K, so that each part meets each of the other."""
    pieces = a.view(*a.shape[:-1], num_a, -1)
    return pieces.repeat_interleave(num_b, dim=-2).flatten(-2), b.repeat(num_a, 1)

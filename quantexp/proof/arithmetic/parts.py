"""What a part takes out of an operand, in integers: `quantexp.quant.parts` states what that is.

# R rows, W width
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats.spec import Part
from quantexp.formats.types import Axis, Take
from quantexp.proof.arithmetic.low_rank import projection


def part_of(x: Tensor, part: Part, *, is_weight: bool) -> Tensor:
    """What a part takes out of x, float32 of any shape whose last dimension is the width; zero elsewhere."""
    if part.along is Axis.KEYS:  # of each sequence and head
        tokens = replace(part, along=Axis.TOKENS)
        return part_of(x.reshape(len(x), -1), tokens, is_weight=False).reshape(x.shape)
    matrix = x.reshape(-1, x.shape[-1])
    if not matrix.numel():
        return torch.zeros_like(x)
    if part.take is Take.ELEMENTS:
        return _where(_largest(matrix.abs().reshape(-1), part).reshape(matrix.shape), matrix, x)
    if part.take is Take.LOW_RANK:
        return projection(matrix, _number(part, min(matrix.shape))).reshape(x.shape)
    rows = part.along is Axis.TOKENS or (is_weight and part.along is Axis.OUTPUT_WIDTH)
    columns = matrix if rows else matrix.T  # those that are added up
    wide = columns.to(torch.float64)
    if part.take is Take.CHANNELS:
        squares = wide * wide
        sums, exponents = _integer_sums(squares, squares.max().expand(1, squares.shape[1]))
        if not bool(squares.isfinite().all()):
            return torch.zeros_like(x)
        chosen = _largest(torch.ldexp(sums.double(), exponents)[0], part).expand_as(columns)
        return _where(chosen if rows else chosen.T, matrix, x)
    sums, exponents = _integer_sums(wide, wide.abs().max(dim=0, keepdim=True).values)
    means = (torch.ldexp(sums.double(), exponents) / len(columns)).float()
    means[:, ~wide.isfinite().all(dim=0)] = torch.nan
    means = means.expand_as(columns)
    return (means if rows else means.T).reshape(x.shape)


def _integer_sums(x_RW: Tensor, amax_1W: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each column as an integer, times two to an exponent."""
    room = 52 - (len(x_RW) - 1).bit_length()
    exponents = torch.frexp(amax_1W).exponent - room
    exponents = torch.where(amax_1W.isfinite() & (amax_1W != 0), exponents, -room)
    integers = torch.ldexp(x_RW, -exponents).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int64)
    return integers.sum(dim=0, keepdim=True), exponents


def _largest(magnitudes: Tensor, part: Part) -> Tensor:
    total = len(magnitudes)
    ordered, _ = torch.sort(magnitudes)  # NaN last
    return magnitudes >= ordered[max(0, total - _number(part, total))]


def _number(part: Part, total: int) -> int:
    number = part.number if part.share is None else round(part.share * total)
    assert number is not None
    return max(number, 1)


def _where(chosen: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
    return torch.where(chosen, matrix, torch.zeros_like(matrix)).reshape(x.shape)

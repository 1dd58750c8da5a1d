"""Where the parts of a rank's operands lie in the whole operands, from the ranks' places and the shapes alone.

    tensor parallel        column layers (qkv, fc1, ..) have a share of w's rows and g's columns, row layers (proj, fc2)
                           of w's and x's columns; fc1 a share of gate and one of up; attention a share of the heads
    context parallel       two of 2 N equal parts of a sequence, rank r the parts r and 2 N - 1 - r; k and v are whole
    expert-tensor parallel as tensor parallel, of routed experts, whose rows are whole

Training has a table of its own for this (`quantexp.training.megatron.numerics_state`), which is not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats import Place
from quantexp.model.decoder import is_routed
from quantexp.quant.sites import Operand

#: A part of a rank's operand, and its place in the whole one.
Piece = tuple[tuple[slice, ...], Place]
#: Start in the rank's operand, length, and start in the whole one.
_Range = tuple[int, int, int]


@dataclass(frozen=True)
class Ranks:
    """This rank's index among those that share a module, and their number."""

    tensor: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)
    #: Query heads of this rank.
    num_heads: int = 1
    #: Key-value heads of the model.
    num_groups: int = 1

    def pieces(self, module: str, operand: Operand, shape: tuple[int, ...]) -> list[Piece]:
        """The pieces of an operand of this shape, as the products take it; none if it is whole."""
        share = self.expert_tensor if is_routed(module) else self.tensor
        ranges: list[list[_Range]] = [[(0, extent, 0)] for extent in shape]
        whole = list(shape)

        def cut(axis: int, own: list[_Range], number: int) -> None:
            ranges[axis], whole[axis] = own, shape[axis] * number

        if operand in (Operand.P, Operand.DS, Operand.DO):
            cut(0, _parts(shape[0], share, shape[0] // self.num_heads), share[1])
            cut(1, from_both_ends(shape[1], self.context), self.context[1])
        elif operand in (Operand.Q, Operand.K, Operand.V):
            rank, size = share
            if operand is not Operand.Q and self.num_groups < size:
                rank, size = rank * self.num_groups // size, self.num_groups
            cut(2, _parts(shape[2], (rank, size)), size)
            if operand is Operand.Q:
                cut(0, from_both_ends(shape[0], self.context), self.context[1])
        else:
            is_row = module == "proj" or module.endswith("fc2")
            divided = {Operand.W: int(is_row)}.get(operand, len(shape) - 1)
            if operand is Operand.W or (operand is Operand.X) == is_row:
                both = 2 if module.endswith("fc1") else 1
                cut(divided, _parts(shape[divided], share, both), share[1])
            if operand is not Operand.W and not is_routed(module):
                cut(0, from_both_ends(shape[0], self.context), self.context[1])
        return [] if tuple(whole) == shape else list(_pieces(ranges, tuple(whole)))


def _parts(extent: int, share: tuple[int, int], number: int = 1) -> list[_Range]:
    """A rank's share of each of so many equal parts."""
    rank, size = share
    if size == 1:
        return [(0, extent, 0)]
    each = extent // number
    return [(part * each, each, (part * size + rank) * each) for part in range(number)]


def from_both_ends(extent: int, share: tuple[int, int]) -> list[_Range]:
    """A rank's two parts of a sequence, of which it has so many tokens."""
    rank, size = share
    if size == 1:
        return [(0, extent, 0)]
    half = extent // 2
    return [(0, half, rank * half), (half, half, (2 * size - 1 - rank) * half)]


def _pieces(ranges: list[list[_Range]], whole: tuple[int, ...]) -> Iterator[Piece]:
    for each in itertools.product(*ranges):
        slices = tuple(slice(own, own + length) for own, length, _ in each)
        yield slices, Place(whole, tuple(start for _, _, start in each))


def place_of(pieces: Sequence[Piece], shape: tuple[int, ...], n: int) -> tuple[int, int, Tensor]:
    """Where matrix n of an operand [N, rows, columns] lies in the whole operand: start, stride, numbers of its rows."""
    rows = torch.arange(shape[1])
    start, stride = n * shape[1] * shape[2], shape[2]
    for (numbers, own, _), place in pieces:
        if numbers.start <= n < numbers.stop:
            whole = place.start[0] + n - numbers.start
            start, stride = whole * place.whole[1] * place.whole[2], place.whole[2]
            rows[own] = torch.arange(own.stop - own.start) + place.start[1]
    return start, stride, rows

"""Rounds a rank's piece of a parameter-shaped tensor as the whole tensor would be rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.formats import Place, QuantSpec, quantise
from quantexp.formats.estimator import noise_slopes
from quantexp.model.finite import is_finite
from quantexp.model.pieces import Box, Piece, boxes, matrix_shape
from quantexp.quant.step_state import Draw, seed_of


@dataclass(frozen=True)
class RoundedPiece:
    """A piece of the values of one parameter, and how they are rounded.

    Args:
        name: the parameter's global name.
        piece: which of its elements these are.
        flat: the elements, contiguous, in the piece's order.
        spec: how they are rounded.
    """

    name: str
    piece: Piece
    flat: Tensor
    spec: QuantSpec

    def boxes(self) -> list[Box]:
        """The piece in boxes of whole and of cut blocks."""
        return list(boxes(self.piece, self.spec.block if self.spec.fmt.block else 1))

    def values(self, box: Box) -> Tensor:
        """The values in a box, [rows, columns], of which `flat` is the memory."""
        return self.flat[box.first : box.stop].view(box.rows, box.columns)

    def place(self, row: int, column: int) -> Place:
        """The place of a matrix whose first element is in this row and column of the parameter."""
        return Place(matrix_shape(self.piece.shape), (row, column))

    def round(self, x: Tensor, row: int, column: int, amax: Tensor | None, draw: Draw) -> None:
        """Round a matrix in place, whose first element is in this row and column of the parameter.

        A value that is not finite stays so, also where the format saturates: a step with one must be left out.
        """
        place = self.place(row, column) if draw else None
        hides = self.spec.fmt.block is None  # in blocks, NaN or Inf makes the whole block NaN
        before = x.clone() if hides and not is_finite(x) else None
        quantise(x, self.spec, axis=-1, amax=amax, out=x, place=place, **draw)
        if before is not None:
            x.copy_(torch.where(before.isfinite(), x, before))

    def take_slopes(self, x: Tensor, amax: Tensor | None) -> None:
        """Replace a matrix by the derivatives of the variances of its elements' stochastic rounding."""
        x.copy_(noise_slopes(x, self.spec, 1, amax))


def draw_of(spec: QuantSpec, seed: int, stream: str, iteration: int) -> Draw:
    """Seed and offset of a stream (`quantexp.quant.step_state`) in an iteration; empty unless the values are random."""
    if not spec.draws:
        return {}
    return {"seed": seed_of(seed, stream), "offset": iteration << 32}

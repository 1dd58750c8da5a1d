"""What the check of attention keeps where rows are divided after the product with v, or delta is of dO and o.

# T queries, K keys, B sequences, H query heads, E head_dim of values, R rows of a tile
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.proof.call import EXPONENTIALS
from quantexp.proof.heads import Heads
from quantexp.proof.products import Expected
from quantexp.proof.softmax import num_wrong_exponentials
from quantexp.quant.sites import Operand


def see_exponentials(
    heads: Heads, E_BHRK: Tensor, sums_BHR1: Tensor, factor: float | None
) -> tuple[int, int]:
    """Keep exp(S - m) and the row sums of the tile whose softmax ran last: how many are wrong, of how many."""
    tile = heads.tile
    rows, of_rows = (heads.rows_of(x, tile.start) for x in (E_BHRK, sums_BHR1))
    heads.keep(EXPONENTIALS, E_BHRK, tile.start)
    if heads.sums is None:
        heads.sums = sums_BHR1.new_ones(len(heads.queries), 1)
    heads.sums[_places(heads, tile.start, E_BHRK.shape[2])] = of_rows
    wrong = num_wrong_exponentials(rows, of_rows, tile, factor)
    return wrong, rows.numel() + of_rows.numel()


def divided(heads: Heads, product: Expected, dtype: torch.dtype) -> Expected:
    """What the chosen rows of o must be, of the product of exp(S - m) and v, in the dtype of both."""
    sums = heads.sums
    assert sums is not None
    return lambda: product().divided(sums, dtype)


def keep_output(heads: Heads, o: Tensor) -> None:
    """Keep the chosen rows of o, [T, B, H E], for delta."""
    heads.output = heads.by_head(o)[:, heads.sequence, heads.heads[0]][heads.queries]


def delta(heads: Heads, start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The row sums of dO o of the chosen queries in a tile, [R, 1], and those of their magnitudes."""
    rows, _ = heads.in_tile(start, num_rows)
    dO = heads.call.sources[Operand.DO][heads.number(heads.heads[0])][rows].double()
    assert heads.output is not None
    parts = dO * heads.output[_places(heads, start, num_rows)].double()
    return parts.sum(dim=1, keepdim=True), parts.abs().sum(dim=1, keepdim=True)


def _places(heads: Heads, start: int, num_rows: int) -> Tensor:
    """Where the chosen queries of a tile are among all."""
    return torch.searchsorted(heads.queries, heads.in_tile(start, num_rows)[0])

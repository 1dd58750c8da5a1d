"""What the check of attention keeps where rows are divided after the product with v, or delta is of dO and o.

# T queries, K keys, B sequences, H query heads, E head_dim of values, R rows of a tile
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.proof.call import EXPONENTIALS
from quantexp.proof.heads import Heads
from quantexp.proof.products import Expected
from quantexp.proof.softmax import Tile, num_wrong_exponentials
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
    wrong, number = num_wrong_exponentials(rows, of_rows, tile, factor), rows.numel()
    if factor is not None:
        at, tile = _repeated(heads, tile.start)
        rows, of_rows = (x[heads.sequence, heads.heads[0]][at] for x in (E_BHRK, sums_BHR1))
        wrong += num_wrong_exponentials(rows, of_rows, tile, factor)
        number += rows.numel()
        heads.scores = None
    return wrong, number


def _repeated(heads: Heads, start: int) -> tuple[Tensor, Tile]:
    """Rows of the first head in a tile whose maximum several scores have, as few others have it; their places in it."""
    assert heads.scores is not None
    S, mask = heads.scores
    S_RK = S[heads.sequence, heads.heads[0]]
    if mask is None:
        R, K = S_RK.shape
        queries = torch.arange(start, start + R, device=S.device)
        hidden = torch.arange(K, device=S.device) > queries[:, None]
    else:
        hidden = mask.expand(S.shape)[heads.sequence, heads.heads[0]]
    visible = S_RK.masked_fill(hidden, -torch.inf)
    number = (visible == visible.amax(dim=1, keepdim=True)).sum(dim=1)
    at = (number > 1).nonzero().flatten()[: len(heads.queries)]
    return at, Tile(start, S_RK[at], hidden[at])


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

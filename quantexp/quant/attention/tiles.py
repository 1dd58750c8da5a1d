"""Attention's queries in tiles: where each begins and ends, and how many keys its queries may see.

A tile is a number of queries against the keys from the first on. It begins at a multiple of `ROWS` queries, and of
every block of P and dS, so that blocks along queries lie in one tile as they lie in the whole; a row of keys is in it
from its beginning, so that blocks along keys do. Fewer than `LEAST` queries at the end belong to the tile before: of a
few rows a matrix product may be made in another way than of many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantexp.quant.slots import Operand

#: Queries of a tile, unless a block is larger. 32 heads of 4096 tokens then hold 2^24 scores at a time.
ROWS = 128
LEAST = 32


@dataclass(frozen=True)
class Tile:
    """The queries in [start, stop), against the first `num_keys` keys."""

    index: int
    start: int
    stop: int
    num_keys: int
    last: bool

    @property
    def rows(self) -> slice:
        """Its queries."""
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        """The keys it is multiplied with."""
        return slice(self.num_keys)


def tiles(num_tokens: int, operands: Iterable[Operand], *, to_last_query: bool) -> list[Tile]:
    """The tiles of so many queries and as many keys.

    Args:
        num_tokens: T.
        operands: how P and dS are held; their blocks stay whole.
        to_last_query: whether a tile goes no farther along the keys than to its last query, rounded up to whole
            blocks: for a causal mask, under which what follows has a probability of 0.
    """
    unit = max([LEAST, *(block for operand in operands for block in _blocks(operand))])
    size = max(ROWS, unit)
    starts = range(0, max(num_tokens - LEAST, 0) + 1, size)
    found = []
    for index, start in enumerate(starts):
        last = index == len(starts) - 1
        stop = num_tokens if last else start + size
        seen = min(num_tokens, -(-stop // unit) * unit) if to_last_query else num_tokens
        found.append(Tile(index, start, stop, seen, last))
    return found


def _blocks(operand: Operand) -> Iterable[int]:
    """The extents of what is quantised or transformed together, all powers of two."""
    return (size for size in (operand.block, operand.hadamard_block) if size is not None)

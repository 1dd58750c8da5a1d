"""Tiles of attention's queries: where each begins and ends, and how many keys its queries may see.

A tile is a range of queries against the keys from the first one on. It begins at a multiple of `ROWS` queries and of
every block of P and dS, so that blocks along queries do not cross tiles. Its rows begin at the first key, so that
blocks along keys are those of the whole tensor. Fewer than `LEAST` queries at the end join the previous tile: a matrix
product of few rows may use another algorithm than one of many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from quantexp.formats.spec import QuantSpec

#: Queries of a tile, unless a block is larger. 32 heads of 4096 tokens then need 2^24 scores at a time.
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
        """The keys that the tile is multiplied with."""
        return slice(self.num_keys)


def tiles(
    num_queries: int,
    specs: Iterable[QuantSpec],
    *,
    to_last_query: bool,
    num_keys: int | None = None,
) -> list[Tile]:
    """The tiles for a number of queries and keys.

    Args:
        num_queries: of one sequence.
        specs: those of P and dS; their blocks stay whole.
        to_last_query: whether a tile's keys end at its last query, rounded up to whole blocks: for a causal mask,
            under which later keys have probability 0.
        num_keys: of one sequence; None means as many as queries.
    """
    unit = lcm(LEAST, *(block for spec in specs for block in (spec.block, spec.hadamard_block)))
    size = -(-ROWS // unit) * unit
    all_keys = num_queries if num_keys is None else num_keys
    starts = range(0, max(num_queries - LEAST, 0) + 1, size)
    result = []
    for index, start in enumerate(starts):
        last = index == len(starts) - 1
        stop = num_queries if last else start + size
        seen = min(all_keys, -(-stop // unit) * unit) if to_last_query else all_keys
        result.append(Tile(index, start, stop, seen, last))
    return result

"""What the kernels of attention in tiles are given, as named tuples that all kernels of a pass share. Needs no Triton.

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values, N = B*H

Triton hands on a tuple's elements one by one, those of tuples within it too.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: A tensor of heads: itself and its strides of sequence, of head and of token; elements of a head are neighbours.
Heads = tuple[Tensor, int, int, int]


class OfP(NamedTuple):
    """What the probabilities of any tile are made from."""

    q: Heads
    k: Heads
    #: Bytes that are not 0 where a query does not see a key, and strides of sequence and of query; None is causal.
    mask: tuple[Tensor, int, int] | None
    #: The largest score of each row, float32.
    m_NT: Tensor
    #: 1 / l, float32.
    inverse_NT: Tensor
    T: int
    H: int
    #: H / G.
    SHARE: int
    #: What scores are multiplied with.
    a: float


class OfDS(NamedTuple):
    """What their gradients, and those of the scores, are made from besides; v and dO as dP multiplies them."""

    v: Heads
    dO: Heads
    #: The sum of dP p over each row, float32.
    d_NT: Tensor
    #: What dP is multiplied with.
    scale_dP: float


class Constants(NamedTuple):
    """What is compiled in."""

    D: int
    E: int
    #: Widths of a tile, powers of two.
    PADDED_D: int
    PADDED_E: int
    #: Extents of a tile.
    ROWS: int
    KEYS: int
    IS_INTERPRETED: bool

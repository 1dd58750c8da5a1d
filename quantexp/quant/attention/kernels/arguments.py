"""Arguments of the tiled attention kernels, as named tuples that all kernels of a pass share. Needs no Triton.

    # T tokens, B sequences, H query heads, G key-value heads, D head_dim, E head_dim of values, N = B*H

Triton flattens a tuple into its elements, nested tuples included.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

#: A tensor of heads: the tensor and its strides over sequences, heads and tokens; elements of a head are contiguous.
Heads = tuple[Tensor, int, int, int]


class OfP(NamedTuple):
    """Inputs to the probabilities of any tile."""

    q: Heads
    k: Heads
    #: Bytes that are nonzero where a query does not see a key, and strides over sequences and queries; None is causal.
    mask: tuple[Tensor, int, int] | None
    #: The largest score of each row, float32.
    m_NT: Tensor
    #: 1 / l, float32.
    inverse_NT: Tensor
    T: int
    H: int
    #: H / G.
    SHARE: int
    #: The factor of the scores.
    a: float


class OfDS(NamedTuple):
    """Further inputs to the gradients of P and of the scores; v and dO quantised for dP."""

    v: Heads
    dO: Heads
    #: The sum of dP p over each row, float32.
    d_NT: Tensor
    #: The factor of dP.
    #: What dP is multiplied with.
    scale_dP: float


class Constants(NamedTuple):
    """Compile-time constants."""

    D: int
    E: int
    #: Widths of a tile, powers of two.
    PADDED_D: int
    PADDED_E: int
    #: Extents of a tile.
    ROWS: int
    KEYS: int
    IS_INTERPRETED: bool

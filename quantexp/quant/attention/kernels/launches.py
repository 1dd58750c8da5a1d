"""Tile sizes, warps and arguments of the attention kernels on a GPU. Needs no Triton.

Tiles and warps affect only speed and the order of sums. Extents are multiples of 32, so that a block lies in one tile.
The values are chosen by the compiler's report for an H200 (sm_90: no spills, enough shared memory), not measured on
one. Other devices have less shared memory, and the compiler needs less for them: at most 87 KB for sm_80, where the
smallest limit is 99 KB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """The launch parameters of one program."""

    #: Queries of a tile.
    rows: int
    #: Keys of a tile.
    keys: int
    num_warps: int
    #: Tiles loaded ahead.
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Launch options for Triton; without fused multiply-add, products and sums are rounded one by one."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**options, "enable_fp_fusion": False}


#: By the wider of key and value heads, padded to a power of two; the first entry at least that wide applies.
LAUNCHES: dict[int, Launch] = {
    64: Launch(64, 64, 8, 2),
    128: Launch(64, 32, 8, 2),
    256: Launch(32, 32, 8, 1),
}


def launch_for(width: int) -> Launch:
    """The launch for heads of a padded width, accepted by `gpu.claims`."""
    return next(launch for widest, launch in LAUNCHES.items() if width <= widest)


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

"""How large the tiles of the attention kernels are on a GPU, and with how many warps. Needs no Triton.

They decide speed alone, but for the order of sums. Extents are multiples of 32, so that blocks lie in one tile. Chosen
by the compiler's report for an H200 (sm_90: nothing is spilled, shared memory suffices), not measured on one. Other
devices have less shared memory, and the compiler needs less for them: 87 KB at most for sm_80, where the
least that any has is 99.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One program's share."""

    #: Queries of a tile.
    rows: int
    #: Keys of a tile.
    keys: int
    num_warps: int
    #: How many tiles are loaded ahead.
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told of it; products and sums are rounded one by one, as they are by torch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**options, "enable_fp_fusion": False}


#: By the wider of key and value heads, padded to a power of two: the first that is as wide.
LAUNCHES: dict[int, Launch] = {
    64: Launch(64, 64, 8, 2),
    128: Launch(64, 32, 8, 2),
    256: Launch(32, 32, 8, 1),
}


def launch_for(width: int) -> Launch:
    """The launch for heads of a padded width, which `gpu.claims` let pass."""
    return next(launch for widest, launch in LAUNCHES.items() if width <= widest)

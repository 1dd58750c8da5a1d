"""How many elements a program of each GPU kernel takes, and with how many warps. Needs no Triton.

They decide speed alone; no number depends on them. Chosen by the compiler's report for an H200 (sm_90: registers,
instructions for each element), not measured on one: `benchmarks/quantise_gpu.py --tune` measures all `CANDIDATES` and
prints the quickest.

A row of a tile is 512 bytes or more, in pieces of 16 a thread; a thread has 16 to 64 elements, so that four or more
programs share a multiprocessor and some load while others calculate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One program's share."""

    #: blocks of 32 elements; for `mx_tile`, of one row, of which a program takes 32.
    blocks: int
    num_warps: int


#: By kernel, and by whether it works on pairs of bfloat16 or on single elements.
LAUNCHES: dict[tuple[str, bool], Launch] = {
    ("mx_flat", True): Launch(64, 4),
    ("mx_flat", False): Launch(64, 4),
    ("mx_tile", True): Launch(8, 4),
    ("mx_tile", False): Launch(4, 4),
    ("hif8_flat", True): Launch(64, 4),
    ("hif8_flat", False): Launch(64, 4),
    ("amax_flat", True): Launch(128, 4),
    ("amax_flat", False): Launch(128, 4),
}

#: What is worth trying for each kernel.
CANDIDATES: dict[str, tuple[Launch, ...]] = {
    "mx_flat": (Launch(32, 4), Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(256, 8)),
    "mx_tile": (Launch(2, 1), Launch(4, 2), Launch(4, 4), Launch(8, 4), Launch(8, 8)),
    "hif8_flat": (Launch(32, 4), Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(256, 8)),
    "amax_flat": (Launch(64, 4), Launch(128, 4), Launch(256, 4), Launch(256, 8), Launch(512, 8)),
}

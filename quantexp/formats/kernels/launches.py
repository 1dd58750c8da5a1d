"""Elements per program and warps of each GPU kernel. Needs no Triton.

They affect only speed; no number depends on them. The values are chosen by the compiler's report for an H200 (sm_90:
registers, instructions per element), not measured on one. `benchmarks/quantise_gpu.py --tune` measures all `CANDIDATES`
and prints the fastest.

A row of a tile is at least 512 bytes, 16 per thread at a time; a thread has 16 to 64 elements, so that four or more
programs share a multiprocessor and some load while others compute.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The launch parameters of one program."""

    #: Blocks of 32 elements; for `mx_tile`, blocks per row, of which a program has 32.
    blocks: int
    num_warps: int


#: By kernel, and by whether it processes pairs of bfloat16 or single elements.
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

#: Launches to measure for each kernel.
CANDIDATES: dict[str, tuple[Launch, ...]] = {
    "mx_flat": (Launch(32, 4), Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(256, 8)),
    "mx_tile": (Launch(2, 1), Launch(4, 2), Launch(4, 4), Launch(8, 4), Launch(8, 8)),
    "hif8_flat": (Launch(32, 4), Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(256, 8)),
    "amax_flat": (Launch(64, 4), Launch(128, 4), Launch(256, 4), Launch(256, 8), Launch(512, 8)),
}

"""The histogram of 16-bit patterns on a GPU, in Triton: `quantexp.capture.statistics.histogram`, in one read.

Each program adds to one of several copies of the counts, so that elements of one value seldom wait for each other, and
sums the zeros itself, which some tensors mostly consist of.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_patterns(
    x_N,
    counts_CV,
    N,
    copies,
    NUM_BINS: tl.constexpr,
    SIZE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Add SIZE of the N patterns, each an integer's 16 bits above SHIFT, to one of `copies` counts, int32."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < N
    raw = tl.load(x_N + at, mask=inside, other=0).to(tl.int32)
    pattern = (raw >> SHIFT) & (NUM_BINS - 1)
    is_zero = pattern == 0
    counts_V = counts_CV + (program % copies) * NUM_BINS
    tl.atomic_add(counts_V + pattern, 1, mask=inside & ~is_zero, sem="relaxed")
    zeros = tl.sum((inside & is_zero).to(tl.int32), 0)
    tl.atomic_add(counts_V, zeros, mask=zeros > 0, sem="relaxed")

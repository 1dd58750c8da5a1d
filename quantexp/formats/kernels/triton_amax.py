"""The largest finite magnitude of a tensor on a GPU, in Triton: `quantexp.formats.finite_amax`, in one read.

The bits of magnitudes order as integers, so an atomic integer maximum combines the programs: exact, and independent of
their order. NaN and Inf count as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantexp.formats.kernels.triton_words import (
    EXPONENT,
    MAGNITUDE,
    first_bits,
    second_bits,
    single_bits,
)


@triton.jit
def finite_magnitude(bits):
    """The bits of |x|, 0 if x is not finite."""
    magnitude = bits & MAGNITUDE
    return tl.where(magnitude < EXPONENT, magnitude, 0)


@triton.jit
def amax_flat(x_N, amax_bits, N, SIZE: tl.constexpr, IS_PAIRS: tl.constexpr):
    """Raise the int32 at `amax_bits`, initially 0, to the bits of the amax of N words (IS_PAIRS) or elements."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE)
    raw = tl.load(x_N + start + at, mask=start + at < N, other=0)
    if IS_PAIRS:
        first = finite_magnitude(first_bits(raw))
        largest = tl.maximum(first, finite_magnitude(second_bits(raw)))
    else:
        largest = finite_magnitude(single_bits(raw))
    tl.atomic_max(amax_bits, tl.max(largest, 0), sem="relaxed")

"""How many elements have which binary exponent: the log2-magnitude histogram.

The exponent is floor(log2 |x|), read from the bits and therefore exact. Bins are the integer
exponents -40 .. 40; what lies outside, zeros, and NaN and Inf are counted apart. Nothing is
rounded: bf16 is counted as bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOWEST_EXPONENT = -40
HIGHEST_EXPONENT = 40
#: The exponent of each bin.
EXPONENTS = tuple(range(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1))

#: dtype -> (integer of the same width, mantissa bits, exponent bias, exponent mask).
_LAYOUTS = {
    torch.bfloat16: (torch.int16, 7, 127, 0xFF),
    torch.float32: (torch.int32, 23, 127, 0xFF),
    torch.float64: (torch.int64, 52, 1023, 0x7FF),
}


@dataclass(frozen=True)
class MagnitudeHistogram:
    """Numbers of elements."""

    #: One for each of `EXPONENTS`.
    counts: tuple[int, ...] = field(default=(0,) * len(EXPONENTS))
    zeros: int = 0
    #: 0 < |x| < 2^-40.
    underflow: int = 0
    #: 2^41 <= |x| < Inf.
    overflow: int = 0
    #: NaN and Inf.
    nonfinite: int = 0

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor Inf."""
        return sum(self.counts) + self.zeros + self.underflow + self.overflow

    @property
    def shares(self) -> list[float]:
        """Each bin's share of the finite elements; zeros where there is none."""
        return [count / max(1, self.finite) for count in self.counts]

    def __add__(self, other: MagnitudeHistogram) -> MagnitudeHistogram:
        """Both tensors together."""
        return MagnitudeHistogram(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            self.zeros + other.zeros,
            self.underflow + other.underflow,
            self.overflow + other.overflow,
            self.nonfinite + other.nonfinite,
        )


def magnitude_histogram(x: Tensor) -> MagnitudeHistogram:
    """The histogram of all elements of x; other dtypes than those above are taken as float32."""
    if x.numel() == 0:
        return MagnitudeHistogram()
    x_N = x.reshape(-1) if x.dtype in _LAYOUTS else x.reshape(-1).to(torch.float32)
    integer, mantissa_bits, bias, mask = _LAYOUTS[x_N.dtype]
    biased_N = (x_N.view(integer) >> mantissa_bits).bitwise_and_(mask)
    counts = torch.bincount(biased_N, minlength=mask + 1).tolist()
    first, last = LOWEST_EXPONENT + bias, HIGHEST_EXPONENT + bias
    zeros = int((x_N == 0).sum()) if counts[0] else 0
    return MagnitudeHistogram(
        counts=tuple(counts[first : last + 1]),
        zeros=zeros,
        underflow=sum(counts[:first]) - zeros,
        overflow=sum(counts[last + 1 : mask]),
        nonfinite=counts[mask],
    )

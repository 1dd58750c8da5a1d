"""The statistics of a tensor that add up exactly, over micro-batches and over the ranks that hold its parts.

amax                largest magnitude of the finite elements
sqnr_db             10 log10(sum of signals / sum of noises)
underflow_share     all elements that become zero, of all that are not
saturated_share     all saturated elements, of all that the format judged
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quantexp.capture.statistics.counts import Counts
from quantexp.capture.statistics.errors import decibel, share


@dataclass(frozen=True)
class Totals:
    """Sums over the elements of one tensor; without a format, those from `signal` to `saturated` are 0."""

    #: None without a finite element.
    amax: float | None = None
    signal: float = 0.0
    noise: float = 0.0
    judged: float = 0.0
    nonzero: float = 0.0
    underflowed: float = 0.0
    saturated: float = 0.0
    #: Finite non-zero elements by floor(log2 |x|).
    magnitudes: Counts = field(default_factory=Counts)

    def __add__(self, other: Totals) -> Totals:
        """The totals of both tensors."""
        amaxes = [one.amax for one in (self, other) if one.amax is not None]
        return Totals(
            max(amaxes, default=None),
            self.signal + other.signal,
            self.noise + other.noise,
            self.judged + other.judged,
            self.nonzero + other.nonzero,
            self.underflowed + other.underflowed,
            self.saturated + other.saturated,
            self.magnitudes + other.magnitudes,
        )

    @property
    def sqnr_db(self) -> float:
        """Inf without noise, NaN without a signal."""
        return decibel(self.signal, self.noise)

    @property
    def underflow_share(self) -> float:
        """NaN without a non-zero element."""
        return share(self.underflowed, self.nonzero)

    @property
    def saturated_share(self) -> float:
        """NaN without a judged element."""
        return share(self.saturated, self.judged)

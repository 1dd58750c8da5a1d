"""Central moments of a stream of chunks, merged as if it were one (Pebay, SAND2008-6212).

With d the difference of two means and n = a + b elements, chunks A and B give

    mean = mean_A + d b/n
    M2 = M2_A + M2_B + d^2 ab/n
    M3 = M3_A + M3_B + d^3 ab(a - b)/n^2 + 3 d (a M2_B - b M2_A)/n
    M4 = M4_A + M4_B + d^4 ab(a^2 - ab + b^2)/n^3 + 6 d^2 (a^2 M2_B + b^2 M2_A)/n^2
         + 4 d (a M3_B - b M3_A)/n
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of finite elements, in float64; mk is the sum of (x - mean)^k."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def __add__(self, other: Moments) -> Moments:
        """Of both chunks together."""
        if not self.count or not other.count:
            return self if self.count else other
        a, b = self.count, other.count
        n = a + b
        d = other.mean - self.mean
        m3 = self.m3 + other.m3 + d**3 * a * b * (a - b) / n**2
        m4 = self.m4 + other.m4 + d**4 * a * b * (a * a - a * b + b * b) / n**3
        return Moments(
            count=n,
            mean=self.mean + d * b / n,
            m2=self.m2 + other.m2 + d * d * a * b / n,
            m3=m3 + 3 * d * (a * other.m2 - b * self.m2) / n,
            m4=m4
            + 6 * d * d * (a * a * other.m2 + b * b * self.m2) / n**2
            + 4 * d * (a * other.m3 - b * self.m3) / n,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
        )


def chunk_moments(x_N: Tensor) -> Moments:
    """The moments of a chunk whose elements are all finite; an empty one gives `Moments()`."""
    if x_N.numel() == 0:
        return Moments()
    d = x_N.to(torch.float64, copy=True)
    low, high = torch.aminmax(d)
    # The rounded mean of equal values may differ from them; theirs is exact.
    mean = float(low) if low == high else float(d.mean())
    d.sub_(mean)
    d2 = d * d
    return Moments(
        count=x_N.numel(),
        mean=mean,
        m2=float(d2.sum()),
        m3=float(torch.dot(d2, d)),
        m4=float(torch.dot(d2, d2)),
        min=float(low),
        max=float(high),
    )

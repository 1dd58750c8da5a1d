"""Sums over the elements of a tensor: power sums, with the moments that result, and totals of its statistics.

    S_k = sum (x - p)^k        mean = p + S_1 / n        m_k = mean of (x - mean)^k, from S_1 .. S_k

Power sums are of the finite elements, about a pivot near the mean, in float64. The pivot is the histogram's mean, which
limits cancellation: with |mean - p| below one part in 128 of the magnitude, the variance of a constant is 0 to 1e-20 of
its square.

Totals add up exactly, over micro-batches and over the ranks that hold a tensor's parts:

    amax                largest magnitude of the finite elements
    sqnr_db             10 log10(sum of signals / sum of noises)
    underflow_share     all elements that become zero, of all that are not
    saturated_share     all saturated elements, of all that the format judged
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.capture.statistics.counts import Counts
from quantexp.capture.statistics.errors import decibel, share
from quantexp.capture.statistics.histogram import Histogram
from quantexp.formats.layout import memory_order

#: Elements of a chunk: on a CPU, whose cache holds their float64 copies, and elsewhere, where a small chunk would take
#: longer to launch than to compute.
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 22


def power_sums(x: Tensor, histogram: Histogram) -> Tensor:
    """[n, p, S_1, S_2, S_3, S_4, min, max], float64, on x's device.

    Without a finite element, min is Inf and max is -Inf. Of an exact histogram of several tensors, [K, 8].
    """
    values, counts = histogram.values, histogram.counts.to(torch.float64)
    n = counts.sum(-1)
    pivot = (values * counts).sum(-1) / n.clamp_min(1)
    if not histogram.exact:
        return _sums_of_elements(x, pivot)
    present = histogram.counts > 0
    d = values - pivot.unsqueeze(-1)
    sums = [n, pivot]
    power = counts
    for _ in range(4):
        power = power * d
        sums.append(power.sum(-1))
    low, high = _extremes(values, present)
    return torch.stack([*sums, low, high], -1)


def _extremes(values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    if values.numel() == 0:
        return values.new_tensor(torch.inf), values.new_tensor(-torch.inf)
    low = torch.where(present, values, torch.inf).amin(-1)
    return low, torch.where(present, values, -torch.inf).amax(-1)


def _sums_of_elements(x: Tensor, pivot: Tensor) -> Tensor:
    x_N = x.detach().permute(memory_order(x)).reshape(-1)
    sums = torch.zeros(5, dtype=torch.float64, device=x.device)
    low, high = torch.full_like(pivot, torch.inf), torch.full_like(pivot, -torch.inf)
    chunk = _CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK
    for part_N in torch.split(x_N, chunk) if x_N.numel() else ():
        finite_N = part_N.isfinite()
        d_N = torch.where(finite_N, part_N.to(torch.float64) - pivot, 0.0)
        square_N = d_N * d_N
        sums += torch.stack(
            [
                finite_N.sum(),
                d_N.sum(),
                square_N.sum(),
                torch.dot(square_N, d_N),
                torch.dot(square_N, square_N),
            ]
        )
        low = torch.minimum(low, torch.where(finite_N, part_N, torch.inf).amin())
        high = torch.maximum(high, torch.where(finite_N, part_N, -torch.inf).amax())
    return torch.cat([sums[:1], pivot[None], sums[1:], low[None], high[None]])


def central_moments(sums: list[float]) -> tuple[float, float, float, float]:
    """Mean, m_2, m_3 and m_4 from `power_sums` of at least one element."""
    n, pivot = sums[:2]
    a, b, c, d = (s / n for s in sums[2:6])
    m2 = max(0.0, b - a * a)
    m3 = c - 3 * a * b + 2 * a**3
    m4 = d - 4 * a * c + 6 * a * a * b - 3 * a**4
    return pivot + a, m2, m3, max(0.0, m4)


def moments(
    mean: float, m2: float, m3: float, m4: float, low: float, high: float
) -> dict[str, float | None]:
    """The record of a tensor's moments, from its central ones and its extremes.

    A spread at the level of float64 rounding has no skewness or kurtosis.
    """
    spread = m2 > 1e-24 * max(low * low, high * high)
    return {
        "mean": mean,
        "std": math.sqrt(m2),
        "min": low,
        "max": high,
        "abs_max": max(abs(low), abs(high)),
        "skew": m3 / m2**1.5 if spread and m2**1.5 else None,
        "kurtosis": m4 / m2**2 if spread and m2**2 else None,
    }


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

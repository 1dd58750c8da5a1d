"""The statistics of a whole tensor from those of its parts.

    exactly             counts, minimum, maximum, amax, the histogram over exponents
    up to rounding      mean, standard deviation, skewness, kurtosis, from the parts' central moments
    not at all          quantiles and the fidelity of a format, which are None

Of a sum of tensors nothing follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantexp.capture.statistics.counts import Counts, from_json

_COUNTS = ("count", "zeros", "nonfinite", "nan", "inf")
_MOMENTS = ("mean", "std", "min", "max", "abs_max", "skew", "kurtosis")


def combined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of a tensor from those of its parts, each a record of `statistics`."""
    counts = {key: sum(record[key] for record in records) for key in _COUNTS}
    finite = [record for record in records if record["count"] > record["nonfinite"]]
    magnitudes = sum((from_json(record["log2_magnitude"]) for record in records), Counts())
    outside = {
        key: sum(record["log2_magnitude"][key] for record in records) for key in ("below", "above")
    }
    return {
        **counts,
        "zero_share": counts["zeros"] / counts["count"] if counts["count"] else None,
        **(_moments(finite) if finite else dict.fromkeys(_MOMENTS)),
        "quantiles": None,
        "log2_magnitude": {**outside, **magnitudes.json()},
        **({"fidelity": None} if any("fidelity" in record for record in records) else {}),
    }


def _moments(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Moments about the mean of all, from each part's moments about its own (Chan, Golub and LeVeque 1983)."""
    sizes = [record["count"] - record["nonfinite"] for record in records]
    total = sum(sizes)
    mean = math.fsum(n * record["mean"] for n, record in zip(sizes, records, strict=True)) / total
    m2, m3, m4 = (
        math.fsum(n * _about(record, mean)[k] for n, record in zip(sizes, records, strict=True))
        / total
        for k in range(3)
    )
    low, high = min(r["min"] for r in records), max(r["max"] for r in records)
    # A spread at the level of float64 rounding has no skewness or kurtosis.
    has_spread = m2 > 1e-24 * max(low * low, high * high) and m2**2 > 0
    return {
        "mean": mean,
        "std": math.sqrt(m2),
        "min": low,
        "max": high,
        "abs_max": max(abs(low), abs(high)),
        "skew": m3 / m2**1.5 if has_spread else None,
        "kurtosis": m4 / m2**2 if has_spread else None,
    }


def _about(record: Mapping[str, Any], mean: float) -> tuple[float, float, float]:
    """The second to fourth moments of a part about another mean."""
    d, m2 = record["mean"] - mean, record["std"] ** 2
    m3, m4 = (record["skew"] or 0.0) * m2**1.5, (record["kurtosis"] or 0.0) * m2**2
    return m2 + d**2, m3 + 3 * d * m2 + d**3, m4 + 4 * d * m3 + 6 * d**2 * m2 + d**4

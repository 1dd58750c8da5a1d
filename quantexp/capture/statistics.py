"""A tensor's statistics, computed where it is."""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(x: Tensor) -> dict[str, float | int | None]:
    """Count, zeros, non-finite elements, and moments over the finite ones, in float64 accumulation.

    Where no element is finite the moments are None. `std` is the population's.
    """
    values = x.detach().flatten()
    finite = values[torch.isfinite(values)]
    counts: dict[str, float | int | None] = {
        "count": values.numel(),
        "zeros": int((values == 0).sum()),
        "nonfinite": values.numel() - finite.numel(),
    }
    if finite.numel() == 0:
        return {**counts, **dict.fromkeys(("mean", "std", "min", "max", "abs_max"))}
    mean = float(finite.sum(dtype=torch.float64)) / finite.numel()
    square = float(torch.linalg.vector_norm(finite, dtype=torch.float64)) ** 2 / finite.numel()
    low, high = (float(v) for v in torch.aminmax(finite))
    return {
        **counts,
        "mean": mean,
        "std": max(0.0, square - mean * mean) ** 0.5,
        "min": low,
        "max": high,
        "abs_max": max(abs(low), abs(high)),
    }

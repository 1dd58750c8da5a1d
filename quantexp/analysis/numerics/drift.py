"""The drift of a tensor between two runs: |a - b| / |a|, with b from the run and a from the reference.

    drift = sqrt(sum (a - b)^2 / sum a^2)      over the elements that are finite in both; NaN where a has none but zeros

The same tensor is that of the same module, layer, operation, iteration, micro-batch and rank, and of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.place import Place
from quantexp.capture.reader import CapturedTensor, open_capture

_CHUNK_ELEMENTS = 1 << 20


def drift_from(entry: CapturedTensor, reference: str) -> float | None:
    """The drift of a tensor from a reference capture; None if the reference does not have the tensor.

    Raises:
        CaptureError: one of them cannot be read.
    """
    partner = _index(reference).get(same_tensor(entry.metadata))
    if partner is None:
        return None
    a, b = partner.torch(), entry.torch()
    if a.shape != b.shape or partner.metadata.get("sample") != entry.metadata.get("sample"):
        return None
    return drift(a, b)


def drift(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a| of two tensors of one shape."""
    energy = apart = 0.0
    a_N, b_N = a.reshape(-1), b.reshape(-1)
    for start in range(0, a_N.numel(), _CHUNK_ELEMENTS):
        x, y = (t[start : start + _CHUNK_ELEMENTS].double() for t in (a_N, b_N))
        known = x.isfinite() & y.isfinite()
        x, y = x[known], y[known]
        energy += float(torch.dot(x, x))
        apart += float((x - y).square().sum())
    return math.sqrt(apart / energy) if energy else math.nan


def same_tensor(metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """The identity of a tensor within its run."""
    place = Place.of(metadata)
    return (
        *(place.module, place.layer, place.operation, place.tensor),
        *(place.iteration, place.micro_batch, place.rank),
    )


@lru_cache(maxsize=2)
def _index(folder: str) -> dict[tuple[Any, ...], CapturedTensor]:
    return {
        same_tensor(entry.metadata): entry for entry in open_capture(Path(folder)).with_values()
    }

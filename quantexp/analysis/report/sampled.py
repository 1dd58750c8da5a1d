"""A bounded look at a captured tensor's values, where its statistics do not say enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantexp.analysis.numerics.measured import Asked, measure
from quantexp.analysis.sample import sample_blocks
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics import statistics
from quantexp.errors import CaptureError

_BLOCK = 32


def statistics_of(entry: CapturedTensor) -> tuple[int, Mapping[str, Any]]:
    """How many elements were looked at, and their statistics; none where the file cannot be read."""
    try:
        values = entry.torch()
    except CaptureError:
        return 0, {}
    if values.numel() == 0:
        return 0, {}
    part, _ = sample_blocks(values, -1, _BLOCK) if values.ndim else (values, 0)
    return part.numel(), statistics(part)


def operands_of(entry: CapturedTensor) -> list[list[Any]]:
    """Slot and format, SQNR, underflow, saturation of each quantised slot that the tensor fills."""
    try:
        operands = measure(entry, Asked(operands_only=True)).operands
    except (CaptureError, OSError):
        return []
    found: list[list[Any]] = []
    for one in operands:
        product, _, operand = one.slot.rpartition(".")
        name = f"{operand} {product} {one.format.split()[0]}"
        fidelity = one.fidelity
        numbers = (fidelity.sqnr_db, fidelity.underflow_share, fidelity.saturated_share)
        found.append([name, *map(_number, numbers)])
    return found


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None

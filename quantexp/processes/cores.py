"""The processor cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence


def allowed_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in found)

"""The processor cores of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

#: The number of cores that a cluster gave a job, whose processes may be allowed to run on all cores of the node.
CORES = "QUANTEXP_CORES"


def num_cores() -> int:
    """The number of processes that may work in parallel: one for each core of this process or, in a job, of the job."""
    return int(os.environ.get(CORES) or len(allowed_cores()))


def allowed_cores() -> list[int]:
    """The cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)

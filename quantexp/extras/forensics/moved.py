"""What moved first before a trigger fired: statistics that left their band, ranked by how early they did.

The band of a series is its median in the first half of the ring, plus and minus `BAND` robust standard deviations
(`quantexp.capture.past`), of which each statistic has a smallest one. A series has left its band at the first of
the iterations up to the last one in which it is outside throughout: one that comes back has not left it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from quantexp.capture.lines import lists_of
from quantexp.capture.names import place
from quantexp.capture.past import centre_and_deviation
from quantexp.capture.store.manifest import STATISTICS, lines_of

#: Half the width of a band, in robust standard deviations.
BAND = 6.0
#: Fewer iterations have no band.
FEWEST = 8


@dataclass(frozen=True)
class Statistic:
    """A number of a tensor's statistics, as a series of iterations."""

    name: str
    #: Of the statistics of one tensor; None if they have none.
    of: Callable[[Mapping[str, Any]], float | None]
    #: The smallest robust standard deviation.
    least: float
    #: Whether the largest of several parts or micro-batches counts, and not their mean.
    is_largest: bool = False


def _log2(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    def of(statistics: Mapping[str, Any]) -> float | None:
        value = statistics.get(key)
        return math.log2(value) if value else None

    return of


def _fidelity(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda statistics: (statistics.get("fidelity") or {}).get(key)


#: An amax moves by a tenth of a binary order from batch to batch, an SQNR by tenths of a decibel.
STATISTICS_SHOWN = (
    Statistic("not finite", lambda s: float(s.get("nonfinite") or 0), 0.1, is_largest=True),
    Statistic("log2 amax", _log2("abs_max"), 0.1, is_largest=True),
    Statistic("log2 std", _log2("std"), 0.05),
    Statistic("saturated share", _fidelity("saturated_share"), 0.002),
    Statistic("underflow share", _fidelity("underflow_share"), 0.005),
    Statistic("SQNR in dB", _fidelity("sqnr_db"), 0.2),
)


@dataclass(frozen=True)
class Series:
    """A statistic of one tensor over the iterations of a ring."""

    layer: int
    module: str
    operation: str
    tensor: str
    statistic: str
    iterations: tuple[int, ...]
    values: tuple[float, ...]
    #: The band.
    low: float
    high: float
    #: The first iteration from which on it lies outside; None if it does not at the end.
    left_at: int | None
    #: How many robust standard deviations the last value lies from the median.
    deviations: float

    @property
    def where(self) -> str:
        """`L3-fc1 input`; the gradients of a tensor have names of their own."""
        return f"{place(self.layer, self.module)} {self.tensor}"


def moved_first(folder: Path, last: int) -> list[Series]:
    """The series of a dossier that left their bands: the earliest first, of one iteration the farthest first.

    `last` is the iteration after which the dossier was written. Empty without a ring, or with one of fewer than
    `FEWEST` iterations.
    """
    left = [series for series in all_series(folder, last) if series.left_at is not None]
    return sorted(left, key=lambda series: (series.left_at, -abs(series.deviations)))


def all_series(folder: Path, last: int) -> list[Series]:
    """Every series of a dossier's ring, up to an iteration."""
    lines = [
        line
        for file in lists_of(folder, STATISTICS)
        for line in lines_of(file)
        if line.get("statistics") and line["iteration"] <= last
    ]
    return list(series_of(lines))


def series_of(lines: Iterable[Mapping[str, Any]]) -> Iterable[Series]:
    """The series of lines of statistics; a tensor that is not in every iteration has none."""
    found: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    iterations: set[int] = set()
    for line in lines:
        iterations.add(line["iteration"])
        for statistic in STATISTICS_SHOWN:
            value = statistic.of(line["statistics"])
            if value is not None:
                key = (line["layer"], line["module"], line["operation"], line["tensor"], statistic)
                found[key][line["iteration"]].append(value)
    ordered = sorted(iterations)
    if len(ordered) < FEWEST:
        return
    for (layer, module, operation, tensor, statistic), by_iteration in found.items():
        if len(by_iteration) < len(ordered):
            continue
        together = max if statistic.is_largest else fmean
        values = [together(by_iteration[i]) for i in ordered]
        yield _judged((layer, module, operation, tensor), statistic, ordered, values)


def _judged(
    key: tuple[int, str, str, str],
    statistic: Statistic,
    iterations: Sequence[int],
    values: Sequence[float],
) -> Series:
    median, deviation = centre_and_deviation(list(values[: len(values) // 2]))
    deviation = max(deviation, statistic.least)
    low, high = median - BAND * deviation, median + BAND * deviation
    left_at = None
    for iteration, value in zip(reversed(iterations), reversed(values), strict=True):
        if low <= value <= high:
            break
        left_at = iteration
    return Series(
        *key,
        statistic.name,
        tuple(iterations),
        tuple(values),
        low,
        high,
        left_at,
        (values[-1] - median) / deviation,
    )

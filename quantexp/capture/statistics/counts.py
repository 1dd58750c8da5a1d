"""Counts over consecutive integers: histograms of exponents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Counts of `first`, `first + 1`, ..., without empty ends."""

    first: int = 0
    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The total count."""
        return sum(self.counts)

    def items(self) -> Iterator[tuple[int, int]]:
        """Each integer with its count, including zero counts between the ends."""
        return enumerate(self.counts, start=self.first)

    def quantile(self, share: float) -> int | None:
        """The smallest integer that at least this fraction does not exceed; None without counts."""
        needed, cumulative = share * self.total, 0
        for value, count in self.items():
            cumulative += count
            if cumulative >= needed and cumulative:
                return value
        return None

    def without(self, value: int) -> tuple[Counts, int]:
        """The counts without one integer, and the count of that integer."""
        kept = [0 if v == value else count for v, count in self.items()]
        return of_exponents(kept, self.first), self.total - sum(kept)

    def json(self) -> dict[str, Any]:
        """The form in the capture's statistics, which `from_json` reads; without counts, `first` is None."""
        return {"first": self.first if self.counts else None, "counts": list(self.counts)}

    def __add__(self, other: Counts) -> Counts:
        """The sum of both counts."""
        if not (self.counts and other.counts):
            return self if self.counts else other
        first = min(self.first, other.first)
        end = max(self.first + len(self.counts), other.first + len(other.counts))
        sums = [0] * (end - first)
        for one in (self, other):
            for value, count in one.items():
                sums[value - first] += count
        return Counts(first, tuple(sums))


def of_exponents(counts: Sequence[int], first: int) -> Counts:
    """Counts without empty ends."""
    occurring = [place for place, count in enumerate(counts) if count]
    if not occurring:
        return Counts()
    start, end = occurring[0], occurring[-1] + 1
    return Counts(first + start, tuple(counts[start:end]))


def from_json(histogram: Mapping[str, Any] | None) -> Counts:
    """Counts from the output of `Counts.json`."""
    if not histogram or histogram.get("first") is None:
        return Counts()
    return of_exponents([int(count) for count in histogram["counts"]], int(histogram["first"]))

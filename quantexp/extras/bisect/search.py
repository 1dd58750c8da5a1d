"""The search of `quantexp bisect`: two controls, then delta debugging over the units of a scheme.

    the whole scheme      must show the trouble, else it is not reproduced
    nothing quantised     must not show it, else it is not the quantisation

A replay is named by the units that it quantises; all others are in bf16. What a replay is asked for is a function, so
the search knows neither runs nor measures.

`ddmin` finds a minimal set of units that is enough for the trouble. It is the algorithm of Zeller and Hildebrandt,
Simplifying and Isolating Failure-Inducing Input, IEEE Transactions on Software Engineering 28(2), 2002, section 3. A
set "fails" if the trouble appears when its units, and no others, are quantised. The result S fails, and S without any
one of its units does not (1-minimal). Hence the complement of S is a maximal set that may be in bf16 while the trouble
stays: with any one more unit in bf16, it is gone.

Tests of one round do not depend on each other and are passed on together, so that they can run in parallel. No set is
tested twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

#: Indices of units.
Subset: TypeAlias = frozenset[int]


class Verdict(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NOT_REPRODUCED = "not reproduced"
    NOT_QUANTISATION = "not the quantisation"


@dataclass(frozen=True)
class Observed:
    """A replay, and whether it shows the trouble."""

    quantised: Subset
    is_trouble: bool
    #: What was measured, for tables.
    words: str
    #: The folder of its run.
    run: str


#: Runs replays in parallel, in the order of the sets.
Observe = Callable[[Sequence[Subset]], Sequence[Observed]]


@dataclass
class Found:
    """The result of a search."""

    verdict: Verdict
    #: Every replay in the order of the search, the controls first.
    observed: list[Observed] = field(default_factory=list)
    #: Disjoint sets of units; each is enough for the trouble, and no longer if one of its units is in bf16.
    enough: list[Subset] = field(default_factory=list)
    #: Units whose bf16 ends the trouble; it comes back if one of them is quantised.
    cure: Subset = frozenset()


def search(number: int, observe: Observe, is_bf16_troubled: Callable[[Observed], bool]) -> Found:
    """Search among `number` units.

    Args:
        number: of units.
        observe: runs replays.
        is_bf16_troubled: whether the replay with nothing quantised shows the trouble by itself.
    """
    everything, nothing = frozenset(range(number)), Subset()
    found = Found(Verdict.FOUND)

    def tests(subsets: Sequence[Subset]) -> list[bool]:
        observed = observe(subsets)
        found.observed += observed
        return [each.is_trouble for each in observed]

    cached = CachedTests(tests)
    whole, none = cached([everything, nothing])
    if none or is_bf16_troubled(found.observed[1]):
        found.verdict = Verdict.NOT_QUANTISATION
    elif not whole:
        found.verdict = Verdict.NOT_REPRODUCED
    else:
        found.enough = minimal_sets(everything, cached)
        culprits = Subset().union(*found.enough)
        found.cure = minimal_cure(everything, culprits, cached)
    return found


#: Whether each of several sets fails.
Tests: TypeAlias = Callable[[Sequence[Subset]], Sequence[bool]]


class CachedTests:
    """Tests that run once for each set."""

    def __init__(self, tests: Tests) -> None:
        self._tests = tests
        #: Every set that was tested, in order -> whether it failed.
        self.results: dict[Subset, bool] = {}

    def __call__(self, subsets: Sequence[Subset]) -> list[bool]:
        """Whether each set fails."""
        new = [each for each in dict.fromkeys(subsets) if each not in self.results]
        if new:
            self.results.update(zip(new, self._tests(new), strict=True))
        return [self.results[each] for each in subsets]


def ddmin(units: Subset, tests: Tests) -> Subset:
    """A 1-minimal failing subset of `units`, which fails itself; the empty set is taken not to fail."""
    current, number = units, 2
    while len(current) > 1:
        parts = _parts(current, number)
        smaller = _first_failing(parts, tests)
        if smaller is not None:
            current, number = smaller, 2
            continue
        # With two parts the complements are the parts.
        others = [current - part for part in parts] if number > 2 else []
        smaller = _first_failing(others, tests)
        if smaller is not None:
            current, number = smaller, max(number - 1, 2)
        elif number < len(current):
            number = min(2 * number, len(current))
        else:
            break
    return current


def minimal_sets(units: Subset, tests: Tests) -> list[Subset]:
    """Disjoint 1-minimal failing sets until what is left of `units` no longer fails; `units` fails."""
    found: list[Subset] = []
    left = units
    while left and tests([left])[0]:
        found.append(ddmin(left, tests))
        left = left - found[-1]
    return found


def minimal_cure(units: Subset, culprits: Subset, tests: Tests) -> Subset:
    """A smallest part of `culprits` that `units` must lose in order not to fail; no single one of it can stay.

    `units` without `culprits` does not fail, and `units` fails.
    """
    return ddmin(culprits, lambda cures: [not each for each in tests([units - c for c in cures])])


def _parts(current: Subset, number: int) -> list[Subset]:
    """The set in `number` parts of nearly equal size, in order."""
    ordered = sorted(current)
    bounds = [len(ordered) * i // number for i in range(number + 1)]
    return [frozenset(ordered[start:stop]) for start, stop in pairwise(bounds)]


def _first_failing(subsets: Sequence[Subset], tests: Tests) -> Subset | None:
    if not subsets:
        return None
    return next((s for s, fails in zip(subsets, tests(subsets), strict=True) if fails), None)

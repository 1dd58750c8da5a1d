"""The search of `quantexp bisect`: two controls, then delta debugging over the units of a scheme.

    the whole scheme      must show the trouble, else it is not reproduced
    nothing quantised     must not show it, else it is not the quantisation

A replay is named by the units that it quantises; all others are in bf16. What a replay is asked for is a function, so
the search knows neither runs nor measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from quantexp.extras.bisect.ddmin import CachedTests, Subset, minimal_cure, minimal_sets


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

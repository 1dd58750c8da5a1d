"""Selects the best candidate for a slot, for the table and the recommendation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quantexp.analysis.requantise.candidates import Candidate
from quantexp.analysis.requantise.tally import Worst
from quantexp.formats import Format

#: Smaller differences do not count, because the sampled blocks and random numbers cause as much.
NO_DIFFERENCE_DB = 0.1


def best_of(indices: Iterable[int], worst: Sequence[Worst]) -> int | None:
    """The first candidate whose worst SQNR is within 0.1 dB of the highest; None without candidates.

    An SQNR that is not a number (tensors of zeros) is below every other.
    """
    known = {i: -math.inf if math.isnan(worst[i].sqnr_db) else worst[i].sqnr_db for i in indices}
    if not known:
        return None
    enough = max(known.values()) - NO_DIFFERENCE_DB
    return next(i for i, sqnr_db in known.items() if sqnr_db >= enough)


def best_of_formats(
    candidates: Sequence[Candidate], worst: Sequence[Worst]
) -> dict[Format, tuple[Candidate, Worst]]:
    """The best candidate of each format."""
    by_format: dict[Format, list[int]] = {}
    for index, candidate in enumerate(candidates):
        by_format.setdefault(candidate.format, []).append(index)
    best = {fmt: best_of(indices, worst) for fmt, indices in by_format.items()}
    return {fmt: (candidates[i], worst[i]) for fmt, i in best.items() if i is not None}

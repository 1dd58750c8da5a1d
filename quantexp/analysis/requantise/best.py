"""Which of several candidates serves a slot best: what the table shows, and what is recommended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quantexp.analysis.requantise.candidates import Candidate
from quantexp.analysis.requantise.tally import Worst
from quantexp.formats import Format

#: Less is no difference: the blocks that are looked at, and what random numbers were drawn, make as much.
NO_DIFFERENCE_DB = 0.1


def best_of(indices: Iterable[int], worst: Sequence[Worst]) -> int | None:
    """The first of these candidates whose worst SQNR is within 0.1 dB of the highest; None of none.

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
    """For each format its best candidate."""
    by_format: dict[Format, list[int]] = {}
    for index, candidate in enumerate(candidates):
        by_format.setdefault(candidate.format, []).append(index)
    best = {fmt: best_of(indices, worst) for fmt, indices in by_format.items()}
    return {fmt: (candidates[i], worst[i]) for fmt, i in best.items() if i is not None}

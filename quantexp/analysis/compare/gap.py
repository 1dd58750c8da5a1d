"""The loss above the baseline's: paired, iteration by iteration, over the iterations that both have."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from quantexp.analysis.tensors.run_record import LossCurve

#: The share of the common iterations, from the end, that `late` is the mean over.
LATE_SHARE = 0.1


@dataclass(frozen=True)
class Gap:
    """Differences of training loss, nats a token; iterations where either loss is not finite are left out."""

    iterations: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def iteration(self) -> int:
        """The last iteration that both have."""
        return self.iterations[-1]

    @property
    def last(self) -> float:
        """The gap there."""
        return self.gaps[-1]

    @property
    def num_late(self) -> int:
        """How many iterations the mean at the end is over, at least one."""
        return max(1, round(LATE_SHARE * len(self.gaps)))

    @property
    def late(self) -> float:
        """The mean over the last tenth: one iteration's loss varies with its batch, and the difference does too."""
        return fmean(self.gaps[-self.num_late :])


def gap_to(here: LossCurve, baseline: LossCurve) -> Gap | None:
    """The gap of a run to its baseline; None where they have no finite loss in common."""
    other = dict(zip(baseline.iterations, baseline.losses, strict=True))
    pairs = [
        (iteration, loss - other[iteration])
        for iteration, loss in zip(here.iterations, here.losses, strict=True)
        if iteration in other
    ]
    if not pairs:
        return None
    iterations, gaps = zip(*pairs, strict=True)
    return Gap(iterations, gaps)


def milestones(iterations: tuple[int, ...], count: int) -> list[int]:
    """At most `count` of the iterations, evenly spread, the first and the last among them; none if it is below 2."""
    if count < 2:
        return []
    if len(iterations) <= count:
        return list(iterations)
    step = (len(iterations) - 1) / (count - 1)
    return [iterations[round(i * step)] for i in range(count)]

"""The gap: the loss above the baseline's, paired by iteration, over the common iterations."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from quantexp.runs.metrics import LossCurve

#: The last fraction of the common iterations over which `late` is the mean.
LATE_SHARE = 0.1


@dataclass(frozen=True)
class Gap:
    """Differences of training loss in nats per token, without iterations in which either loss is not finite."""

    iterations: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def iteration(self) -> int:
        """The last common iteration."""
        return self.iterations[-1]

    @property
    def last(self) -> float:
        """The gap at the last common iteration."""
        return self.gaps[-1]

    @property
    def num_late(self) -> int:
        """The number of iterations of the final mean, at least one."""
        return max(1, round(LATE_SHARE * len(self.gaps)))

    @property
    def late(self) -> float:
        """The mean over the last tenth, because a single iteration's loss and gap vary with the batch."""
        return fmean(self.gaps[-self.num_late :])


def gap_to(here: LossCurve, baseline: LossCurve) -> Gap | None:
    """The gap of a run to its baseline; None without an iteration in which both losses are finite."""
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
    """At most `count` iterations, evenly spaced, including the first and the last; none if `count` is below 2."""
    if count < 2:
        return []
    if len(iterations) <= count:
        return list(iterations)
    step = (len(iterations) - 1) / (count - 1)
    return [iterations[round(i * step)] for i in range(count)]

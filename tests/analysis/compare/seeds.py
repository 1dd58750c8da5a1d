"""Runs of several seeds whose gaps are chosen, and their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantexp.analysis.compare.comparison import Comparison, compare
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import Verdict, Verdicts
from quantexp.runs.paths import RunDir

from .runs import Runs

ITERATIONS = 20
SEEDS = range(1, 5)
#: Ends of perturbed runs whose floor, 0.026, is far below 0.1, and near which gaps of 0.1 to 0.12 do not spread more.
CHAOS = (0.006, -0.006)


def compared(folders: Sequence[RunDir], measure: str = "loss") -> Comparison:
    return compare([read_side(run, measure) for run in folders])


def curve(end: float) -> list[float]:
    """A loss whose last two values, a tenth of twenty, have the mean `end`."""
    return [6.0] * (ITERATIONS - 2) + [end + 0.5, end - 0.5]


def design(
    runs: Runs, gaps: Mapping[str, Sequence[float]], chaos: Sequence[float] = ()
) -> list[RunDir]:
    """Bf16 at each seed, each scheme at each seed with its gap, and perturbed bf16 runs of the first seed."""
    folders = [runs.add("bf16", curve(3 + seed), seed=seed, iterations=20) for seed in SEEDS]
    for scheme, values in gaps.items():
        for seed, gap in zip(SEEDS, values, strict=False):
            folders.append(runs.add(scheme, curve(3 + seed + gap), seed=seed, iterations=20))
    for number, gap in enumerate(chaos, 1):
        folders.append(runs.add("bf16", curve(4 + gap), seed=1, iterations=20, chaos=number))
    return folders


def verdict_of(verdicts: Verdicts, scheme: str) -> Verdict:
    (verdict,) = (each for each in verdicts.schemes if each.label == scheme)
    return verdict

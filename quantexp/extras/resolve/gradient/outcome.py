"""From the lines of results.jsonl to numbers with intervals over seeds, and verdicts.

A unit is a checkpoint of a seed. The units of a seed are averaged first, then intervals and tests are over one number
for each seed. Of a scheme A against the baseline B each unit gives three differences, which do not depend on how large
the gradient is:

    error       ln of the ratio of the errors |e|, A to B
    bias        (squared bias of A - that of B) / squared error of B
    variance    the same of the variance

The last two add up to the ratio of the squared errors, less one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from quantexp.analysis.compare.noise import FEWEST, interval
from quantexp.extras.resolve.gradient.design import GradientDesign
from quantexp.extras.resolve.gradient.estimates import Estimates
from quantexp.extras.resolve.gradient.results import ADAM, RAW, WHOLE, Line
from quantexp.extras.resolve.judging import Judgement, judged

SCALINGS = (RAW, ADAM)


class Measure(Enum):
    """What is said of an error, relative to the gradient in fp32; squares but for the first and the last."""

    ERROR = "error"
    BIAS = "bias"
    VARIANCE = "variance"
    DRAWS = "draws"
    COSINE = "cosine"


#: Those that are judged.
JUDGED = (Measure.ERROR, Measure.BIAS, Measure.VARIANCE)


@dataclass(frozen=True)
class Number:
    """A measure: the mean over seeds of the means over their checkpoints."""

    by_seed: Mapping[int, float]

    @property
    def is_finite(self) -> bool:
        """Whether there is a value, and all are finite."""
        return bool(self.by_seed) and all(map(math.isfinite, self.by_seed.values()))

    @property
    def mean(self) -> float | None:
        """None if a value is not finite."""
        return fmean(self.by_seed.values()) if self.is_finite else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval by Student's t; None with fewer than three seeds."""
        is_known = self.is_finite and len(self.by_seed) >= FEWEST
        return interval(list(self.by_seed.values())) if is_known else None


@dataclass(frozen=True)
class Row:
    """A scheme, or a part of it alone."""

    scheme: str
    #: `WHOLE`, or the part in words.
    part: str
    #: Of all parameters, then of each group.
    numbers: Sequence[Mapping[Measure, Number]]


@dataclass(frozen=True)
class Outcome:
    """What is known of a design, as far as its units have run."""

    design: GradientDesign
    margin: float
    #: Of parameters, in the order of the model; empty without a unit.
    groups: Sequence[str]
    #: By scaling.
    rows: Mapping[str, Sequence[Row]]
    #: By scaling and measure, each scheme against the baseline; each list is judged together.
    verdicts: Mapping[str, Mapping[Measure, Sequence[Judgement]]]
    #: |E r|^2 / E |r|^2 of the gradients r in fp32, all parameters.
    signal: Mapping[str, Number]
    #: Of the processor, of all arms that count.
    cpu_s: float


def outcome_of(
    design: GradientDesign, results: Mapping[str, Line], margin: float, looks: Sequence[int] = ()
) -> Outcome:
    """Judge what is there; an arm whose proof failed, or of other code, batches, draws or parts, counts as none."""
    lines = {
        (branch.arm.name, branch.unit.base.seed, branch.unit.checkpoint): results[branch.name]
        for branch in design.branches
        if design.has(branch, results)
    }
    by_arm = {
        arm.name: [line for (name, *_), line in lines.items() if name == arm.name]
        for arm in design.arms
    }
    scalings = [s for s in SCALINGS if any(s in line["signal"] for line in lines.values())]
    verdicts = {
        scaling: {
            measure: judged(
                [_draft(arm.name, lines, design, scaling, measure) for arm in design.arms[1:]],
                math.log1p(margin) if measure is Measure.ERROR else margin,
                looks,
            )
            for measure in JUDGED
        }
        for scaling in scalings
    }
    return Outcome(
        design,
        margin,
        next((line["groups"] for line in lines.values()), []),
        {s: [row for own in by_arm.values() for row in _rows(own, s)] for s in scalings},
        verdicts,
        {s: _signal(by_arm[design.against], s) for s in scalings},
        sum(line["cpu_s"] for line in lines.values()),
    )


def value_of(estimates: Estimates, measure: Measure) -> float:
    """A measure of estimates; NaN without one."""
    error, bias, draws = (
        math.nan if x is None else x
        for x in (estimates["error2"], estimates["bias2"], estimates["draws2"])
    )
    if measure is Measure.COSINE:
        return math.nan if estimates["cosine"] is None else estimates["cosine"]
    squares = {Measure.BIAS: bias, Measure.VARIANCE: error - bias, Measure.DRAWS: draws}
    return squares[measure] if measure in squares else math.sqrt(error)


def _by_seed(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The mean of the values of each seed."""
    lists: dict[int, list[float]] = {}
    for seed, value in values:
        lists.setdefault(seed, []).append(value)
    return {seed: fmean(own) for seed, own in sorted(lists.items())}


def _rows(lines: Sequence[Line], scaling: str) -> list[Row]:
    """The whole scheme, then its parts, in the order of the map; a part only from checkpoints whose map has it."""
    if not lines:
        return []
    names = list(dict.fromkeys([WHOLE, *(name for line in lines for name in line["parts"])]))
    places = range(len(lines[0]["parts"][WHOLE].get(scaling, ())))

    def number(name: str, place: int, measure: Measure) -> Number:
        return Number(
            _by_seed(
                (line["seed"], value_of(line["parts"][name][scaling][place], measure))
                for line in lines
                if name in line["parts"]
            )
        )

    scheme = lines[0]["scheme"]
    return [
        Row(scheme, name, [{m: number(name, place, m) for m in Measure} for place in places])
        for name in names
        if places
    ]


def _signal(lines: Sequence[Line], scaling: str) -> Number:
    values = ((line["seed"], line["signal"].get(scaling, [None])[0]) for line in lines)
    return Number(_by_seed((seed, math.nan if x is None else x) for seed, x in values))


def _draft(
    scheme: str,
    lines: Mapping[tuple[str, int, int], Line],
    design: GradientDesign,
    scaling: str,
    measure: Measure,
) -> Judgement:
    """The differences of a scheme to the baseline, on the checkpoints that both have."""
    gaps = []
    for (name, seed, checkpoint), line in lines.items():
        other = lines.get((design.against, seed, checkpoint))
        if name == scheme and other is not None:
            own, base = (x["parts"][WHOLE][scaling][0] for x in (line, other))
            gaps.append((seed, _GAPS[measure](own, base)))
    return Judgement(scheme, 0, _by_seed(gaps), len(gaps))


def _ratio(own: Estimates, base: Estimates) -> float:
    one, other = (value_of(x, Measure.ERROR) for x in (own, base))
    return math.log(one / other) if one > 0 and other > 0 else math.nan


def _in_parts(measure: Measure) -> Callable[[Estimates, Estimates], float]:
    def gap(own: Estimates, base: Estimates) -> float:
        square = value_of(base, Measure.ERROR) ** 2
        one, other = (value_of(x, measure) for x in (own, base))
        return (one - other) / square if square else math.nan

    return gap


_GAPS = {
    Measure.ERROR: _ratio,
    Measure.BIAS: _in_parts(Measure.BIAS),
    Measure.VARIANCE: _in_parts(Measure.VARIANCE),
}

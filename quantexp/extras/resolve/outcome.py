"""From the lines of results.jsonl to verdicts: pairs the branches of each unit, and judges the differences.

Two measures stand side by side. `working` is the held-out loss with nothing quantised: what training under the scheme
did to the weights. `scheme` is the loss under the scheme, as it would be used: the rounding of this forward pass comes
on top. Each is compared with the baseline under its own arithmetic; for a baseline in bf16 both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from quantexp.extras.resolve.design import Arm, Branch, Design, Unit
from quantexp.extras.resolve.judging import Judgement, judged
from quantexp.extras.resolve.results import Line


class Measure(Enum):
    """What the held-out loss is measured in; the value is the key of results.jsonl."""

    WORKING = "working_loss"
    SCHEME = "scheme_loss"


@dataclass(frozen=True)
class Outcome:
    """The verdicts of a design, as far as its units have run."""

    design: Design
    margin: float
    #: Of each measure, each scheme at each horizon; judged together.
    schemes: Mapping[Measure, Sequence[Judgement]]
    #: The same of the controls, with nothing quantised; each is corrected for controls alone.
    controls: Sequence[Judgement]
    #: Of the processor, of all branches that count.
    cpu_s: float


def outcome_of(
    design: Design, results: Mapping[str, Line], margin: float, looks: Sequence[int] = ()
) -> Outcome:
    """Judge what is there; a branch whose proof failed, or of other code, horizons or text, counts as none."""
    whole = [branch for branch in design.branches if design.has(branch, results)]
    schemes = [arm for arm in design.arms[1:] if arm.control is None]
    controls = [arm for arm in design.arms if arm.control is not None]
    paired = _Paired(design, whole, results)
    return Outcome(
        design,
        margin,
        {each: judged(paired.drafts(schemes, each), margin, looks) for each in Measure},
        judged(paired.drafts(controls, Measure.WORKING), margin, looks),
        sum(results[branch.name]["cpu_s"] for branch in whole),
    )


class _Paired:
    """The branches that count, by unit and arm."""

    def __init__(
        self, design: Design, whole: Sequence[Branch], results: Mapping[str, Line]
    ) -> None:
        self._design = design
        self._lines = {
            (b.unit.base.seed, b.unit.checkpoint, b.arm.name): results[b.name] for b in whole
        }
        units = {(b.unit.base.seed, b.unit.checkpoint): b.unit for b in design.branches}
        self._units = list(units.values())

    def drafts(self, arms: Sequence[Arm], measure: Measure) -> list[Judgement]:
        """The differences of each arm at each horizon."""
        return [self._draft(arm, steps, measure) for arm in arms for steps in self._design.steps]

    def _draft(self, arm: Arm, steps: int, measure: Measure) -> Judgement:
        by_seed: dict[int, list[float]] = {}
        for unit in self._units:
            gap = self._gap(unit, arm, steps, measure)
            if gap is not None:
                by_seed.setdefault(unit.base.seed, []).append(gap)
        gaps = {seed: fmean(values) for seed, values in by_seed.items()}
        return Judgement(arm.name, steps, gaps, sum(map(len, by_seed.values())))

    def _gap(self, unit: Unit, arm: Arm, steps: int, measure: Measure) -> float | None:
        """The loss of an arm above that of the baseline; None without both, NaN if one is not finite."""
        own, baseline = (
            self._lines.get((unit.base.seed, unit.checkpoint, name))
            for name in (arm.name, self._design.against)
        )
        if own is None or baseline is None:
            return None
        losses = [line[measure.value][line["steps"].index(steps)] for line in (own, baseline)]
        one, other = (math.nan if loss is None else loss for loss in losses)
        return one - other

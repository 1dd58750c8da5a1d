"""The signs of trouble in a run and in its replays.

    level_i    the lowest median of any WINDOW losses in a row before iteration i
    rise_i     loss_i - level_i: how far a curve is above what it has been at
    excess_i   loss_i - the loss of iteration i in the replay in bf16
    margin     SIGMAS x 1.4826 x the median of |d - median d|, d the differences of losses in a row, of the last HISTORY
               losses up to the checkpoint

The recent past of a gradient norm is that of the triggers (`quantexp.capture.past`).

A step left out, or a loss that is not finite, is trouble by either measure. In fp16 a step that is left out while the
loss scale falls is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from quantexp.capture.past import CONSISTENT, Past
from quantexp.runs.metrics import is_fault, read_metrics
from quantexp.runs.paths import RunDir

#: Gradient norms of the recent past.
PAST = 64
#: Losses of a median.
WINDOW = 8
#: Losses that the margin is derived from, at most and at least.
HISTORY, FEWEST = 100, 8
SIGMAS = 6.0
#: The margin where there are too few losses, and the least one, as shares of the loss.
_SHARE, _LEAST_SHARE = 0.1, 1e-3


@dataclass(frozen=True)
class Step:
    """One iteration of a run."""

    iteration: int
    #: NaN or Inf if it was not finite.
    loss: float
    is_left_out: bool = False
    grad_norm: float = math.nan

    @property
    def is_nonfinite(self) -> bool:
        """Whether the step was left out, or its loss is not finite."""
        return self.is_left_out or not math.isfinite(self.loss)


@dataclass(frozen=True)
class Trouble:
    """What a run's own record says."""

    #: `nonfinite` or `loss`.
    measure: str
    iteration: int
    words: str


def steps_of(run: RunDir) -> list[Step]:
    """The iterations of a run, oldest first.

    Raises:
        UnreadableError: metrics.jsonl is damaged.
    """
    steps = {}
    for line in read_metrics(run):
        loss = line.get("loss")
        value = math.nan if loss is None else float(loss)
        norm = line.get("grad_norm")
        steps[line["iteration"]] = Step(
            line["iteration"], value, is_fault(line), math.nan if norm is None else float(norm)
        )
    return [steps[iteration] for iteration in sorted(steps)]


def trouble_in(steps: Sequence[Step]) -> Trouble | None:
    """The first step that is not finite, else the largest rise of the loss; None for fewer than two steps."""
    for step in steps:
        if step.is_nonfinite:
            what = "step left out" if step.is_left_out else "loss that is not finite"
            words = f"the first {what} is iteration {step.iteration}"
            return Trouble("nonfinite", step.iteration, words)
    rises = rises_of(steps)
    if not rises:
        return None
    worst = max(rises, key=rises.__getitem__)
    words = f"the largest rise of the loss, {rises[worst]:+.4f}, is at iteration {worst}"
    return Trouble("loss", worst, words)


def rises_of(steps: Sequence[Step]) -> dict[int, float]:
    """Iteration -> how far its loss is above the level before it; without the first one, and losses not finite."""
    rises: dict[int, float] = {}
    level, before = math.inf, list[float]()
    for step in steps:
        if not math.isfinite(step.loss):
            continue
        if before:
            level = min(level, median(before[-WINDOW:]))
            rises[step.iteration] = step.loss - level
        before.append(step.loss)
    return rises


def margin_of(steps: Sequence[Step]) -> float:
    """The margin in nats, from the losses up to the checkpoint; at least a thousandth of the loss.

    With fewer than 8 of them a tenth of the last one; infinite without any.
    """
    losses = [step.loss for step in steps if math.isfinite(step.loss)][-HISTORY:]
    if not losses:
        return math.inf
    if len(losses) < FEWEST:
        return _SHARE * abs(losses[-1])
    differences = [b - a for a, b in pairwise(losses)]
    middle = median(differences)
    deviation = CONSISTENT * median(abs(d - middle) for d in differences)
    return max(SIGMAS * deviation, _LEAST_SHARE * abs(median(losses)))


def excess_of(steps: Sequence[Step], bf16: Sequence[Step]) -> float:
    """The largest excess of a replay over the one in bf16; infinite if a loss alone here is not finite."""
    reference = {step.iteration: step.loss for step in bf16}
    excesses = [
        step.loss - reference[step.iteration] if math.isfinite(step.loss) else math.inf
        for step in steps
        if math.isfinite(reference.get(step.iteration, math.nan))
    ]
    return max(excesses, default=-math.inf)


def deviations_after(history: Sequence[Step], steps: Sequence[Step]) -> float:
    """How far the gradient norm of a replay lies above its recent past, at most, as a dossier's trigger counts it."""
    past, farthest = Past(PAST), -math.inf
    for step in history:
        past.add(step.grad_norm)
    for step in steps:
        farthest = max(farthest, past.deviations(step.grad_norm) or -math.inf)
        past.add(step.grad_norm)
    return farthest


def is_nonfinite(steps: Sequence[Step]) -> bool:
    """Whether a step was left out, or a loss is not finite."""
    return any(step.is_nonfinite for step in steps)


def rise_after(history: Sequence[Step], steps: Sequence[Step]) -> float:
    """The largest rise of a replay over the level of the run before it and of itself."""
    before = [step for step in history if step.iteration < steps[0].iteration] if steps else []
    rises = rises_of([*before, *steps])
    return max((rises[s.iteration] for s in steps if s.iteration in rises), default=-math.inf)

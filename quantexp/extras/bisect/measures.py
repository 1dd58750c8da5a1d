"""What counts as trouble in a replay, and how a run's own record chooses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantexp.errors import RunError
from quantexp.extras.bisect.trouble import (
    Step,
    Trouble,
    deviations_after,
    excess_of,
    is_nonfinite,
    margin_of,
    rise_after,
    steps_of,
    trouble_in,
)
from quantexp.runs.dossiers import Trigger, dossier_files, read_dossier
from quantexp.runs.paths import RunDir

#: The trigger of a dossier -> the measure; others say nothing about a trouble.
_OF_TRIGGER = {
    Trigger.NONFINITE: "nonfinite",
    Trigger.LOSS: "loss",
    Trigger.GRAD_NORM: "grad_norm",
    Trigger.SATURATED: "gradient",
    Trigger.UNDERFLOW: "gradient",
}


@dataclass(frozen=True)
class Observation:
    """The steps of a replay, or the distance of its gradient to that in bf16."""

    steps: tuple[Step, ...] = ()
    #: Infinite if the gradient is not finite.
    distance: float = 0.0


@dataclass(frozen=True)
class Measure:
    """Decides whether a replay shows the trouble."""

    #: `nonfinite`, `loss`, `grad_norm` or `gradient`.
    name: str
    #: In nats (loss), in robust standard deviations (grad_norm), or the relative distance (gradient).
    bound: float
    #: The steps of the run before the replayed ones.
    history: tuple[Step, ...] = ()

    def is_trouble(self, replay: Observation, bf16: Observation) -> bool:
        """Whether a replay shows the trouble that the one in bf16 does not."""
        if self.name == "gradient":
            return replay.distance > self.bound
        if self.name == "nonfinite":
            return is_nonfinite(replay.steps)
        if self.name == "grad_norm":
            return is_nonfinite(replay.steps) or self._deviations(replay) > self.bound
        return is_nonfinite(replay.steps) or excess_of(replay.steps, bf16.steps) > self.bound

    def is_bf16_troubled(self, bf16: Observation) -> bool:
        """Whether the replay in bf16 shows it by itself: a step that is not finite, or a rise above its own level."""
        if self.name == "gradient":
            return not math.isfinite(bf16.distance)
        if self.name == "grad_norm":
            return is_nonfinite(bf16.steps) or self._deviations(bf16) > self.bound
        is_risen = self.name == "loss" and rise_after(self.history, bf16.steps) > self.bound
        return is_nonfinite(bf16.steps) or is_risen

    def _deviations(self, replay: Observation) -> float:
        return deviations_after(self.history, replay.steps)

    def words(self, replay: Observation, bf16: Observation) -> str:
        """What was measured."""
        if self.name == "gradient":
            return f"distance {replay.distance:.4f}"
        bad = next((step for step in replay.steps if step.is_nonfinite), None)
        if bad is not None:
            what = "left out" if bad.is_left_out else "loss not finite"
            return f"iteration {bad.iteration} {what}"
        if self.name == "grad_norm":
            norm = max((step.grad_norm for step in replay.steps), default=math.nan)
            return f"gradient norm at most {norm:.4g}, {self._deviations(replay):+.1f} deviations"
        last = replay.steps[-1].loss if replay.steps else math.nan
        excess = excess_of(replay.steps, bf16.steps)
        return f"loss {last:.4f}, at most {excess:+.4f} to bf16"

    @property
    def about(self) -> str:
        """The criterion in one line."""
        if self.name == "gradient":
            return f"the gradient is further than {self.bound:.4g} from that in bf16, |g - b| / |b|"
        if self.name == "nonfinite":
            return "a step is left out, or a loss is not finite"
        if self.name == "grad_norm":
            return (
                f"a gradient norm lies more than {self.bound:.4g} robust deviations above the median of its recent "
                "past, or is not finite"
            )
        return (
            f"a loss is more than {self.bound:.4g} above that of the replay in bf16, or not finite"
        )


def trouble_of(run: RunDir, measure: str | None, start: int | None, steps: int | None) -> Trouble:
    """What to look for: from the first dossier of a trouble, else from metrics.jsonl.

    `measure` is the user's choice, `start` and `steps` say what is replayed, if the user did.

    Raises:
        RunError: the run's record has nothing to look for, or cannot be read.
    """
    trouble = _in_dossiers(run) or trouble_in(steps_of(run))
    if trouble is None and start is not None and (steps is not None or measure == "gradient"):
        trouble = Trouble(
            measure or "nonfinite", start + (steps or 1), "chosen on the command line"
        )
    if trouble is None:
        raise RunError(
            f"{run.root.name} has too few iterations to look for trouble in; give --from and --steps"
        )
    if measure is None or measure == trouble.measure:
        return trouble
    return Trouble(
        measure,
        trouble.iteration,
        f"what --measure {measure} says, at iteration {trouble.iteration}",
    )


def _in_dossiers(run: RunDir) -> Trouble | None:
    for dossier in map(read_dossier, dossier_files(run)):
        if (measure := _OF_TRIGGER.get(dossier.trigger)) is not None:
            return Trouble(measure, dossier.iteration, f"the dossier says: {dossier.words}")
    return None


def loss_margin(steps: Sequence[Step], start: int) -> float:
    """The default margin, from the losses up to the checkpoint; from the first loss without a checkpoint.

    Raises:
        RunError: there are none.
    """
    margin = margin_of([step for step in steps if step.iteration <= start] or steps[:1])
    if not math.isfinite(margin):
        raise RunError("the run has no finite loss to derive a margin from; give --margin NATS")
    return margin

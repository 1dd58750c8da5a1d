"""Decides whether something went wrong in the iteration that has just ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from quantexp.capture.ring.past import Past
from quantexp.capture.ring.store import Iteration, TensorKey
from quantexp.runs.dossiers import Trigger
from quantexp.runs.metrics import Metrics
from quantexp.schema import TriggerConfig

#: Iterations of the ring before the last one that make a median.
_FEWEST_SHARES = 5


@dataclass(frozen=True)
class Fired:
    """A trigger that fired, and why."""

    trigger: Trigger
    words: str


class Triggers:
    """The triggers of a run; those of loss and gradient norm are the same on every rank."""

    def __init__(self, config: TriggerConfig) -> None:
        self.config = config
        self._past = {name: Past(config.window) for name in ("loss", "grad_norm")}

    def of_metrics(self, metrics: Metrics, *, is_fault: bool) -> Fired | None:
        """What a step's loss and gradient norm say; each joins the past afterwards.

        `is_fault` says that the step was left out, and not to lower the loss scale of fp16.
        """
        fired = None
        if is_fault:
            fired = Fired(Trigger.NONFINITE, metrics.nonfinite or "loss or gradient is not finite")
        for trigger, name in ((Trigger.LOSS, "loss"), (Trigger.GRAD_NORM, "grad_norm")):
            past, value = self._past[name], getattr(metrics, name)
            far = past.deviations(value)
            most = self.config.deviations
            if fired is None and far is not None and most is not None and far > most:
                fired = Fired(trigger, _spike(trigger, value, far, past.median))
            past.add(value)
        return fired

    def of_shares(self, held: Sequence[Iteration]) -> Fired | None:
        """What the last iteration of a rank's ring says of saturated and underflowed values."""
        if self.config.share is None or len(held) <= _FEWEST_SHARES:
            return None
        for trigger, of, words in (
            (Trigger.SATURATED, attrgetter("saturated"), "values that saturate in {}"),
            (Trigger.UNDERFLOW, attrgetter("underflow"), "non-zero values of {} that become zero"),
        ):
            risen = _most_risen([of(iteration) for iteration in held])
            if risen is not None and risen.rise > self.config.share:
                what = words.format(risen.key)
                return Fired(
                    trigger,
                    f"the share of {what} is {risen.last:.1%}, the median of {len(held) - 1} "
                    f"iterations before {risen.median:.1%}",
                )
        return None


def _spike(trigger: Trigger, value: float, deviations: float, median: float) -> str:
    name = "loss" if trigger is Trigger.LOSS else "gradient norm"
    return (
        f"{name} {value:.4g} lies {deviations:.1f} robust deviations above its median {median:.4g}"
    )


@dataclass(frozen=True)
class _Risen:
    key: TensorKey
    last: float
    median: float

    @property
    def rise(self) -> float:
        return self.last - self.median


def _most_risen(shares: Sequence[Mapping[TensorKey, float]]) -> _Risen | None:
    """The tensor whose last share lies farthest above the median of its earlier ones, if it is in all of them."""
    *before, last = shares
    keys = [key for key in last if all(key in each for each in before)]
    if not keys:
        return None
    medians = np.median([[each[key] for key in keys] for each in before], axis=0)
    rises = np.array([last[key] for key in keys]) - medians
    index = int(rises.argmax())
    if not math.isfinite(rises[index]):
        return None
    return _Risen(keys[index], last[keys[index]], float(medians[index]))
